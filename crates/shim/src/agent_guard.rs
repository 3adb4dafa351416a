//! A seccomp filter that protects the limits, the scheduling and the I/O priority of the agent from its container's processes.
//!
//! The agent runs as the container's own user, so the kernel lets that user change them: `prlimit` to zero descriptors would
//! make the agent refuse connections. The filter compares the PID arguments of these calls with the agent's PID in the container's
//! PID namespace, and with 1, which is the agent or the process that holds a shared PID namespace. Calls that take a
//! user in place of a process are refused, since the agent has the same user.

use libc::{c_long, sock_filter};

/// A system call, and the arguments for which it is refused: pairs of index and lower 32 bits.
struct Rule {
    call: c_long,
    conditions: Vec<(u32, u32)>,
}

const PROCESS: u32 = 0;
const GROUP: u32 = 1;
const USER: u32 = 2;
/// `ioprio_set` numbers the same three from 1.
const FIRST_OF_IO_PRIORITY: u32 = 1;

fn rules(agent: u32) -> Vec<Rule> {
    let rule = |call, conditions: &[(u32, u32)]| Rule {
        call,
        conditions: conditions.to_vec(),
    };
    let mut rules = vec![
        rule(libc::SYS_setpriority, &[(0, USER)]),
        rule(libc::SYS_ioprio_set, &[(0, USER + FIRST_OF_IO_PRIORITY)]),
    ];
    let mut processes = vec![1, agent];
    processes.dedup();
    for process in processes {
        for call in [
            libc::SYS_prlimit64,
            libc::SYS_sched_setaffinity,
            libc::SYS_sched_setparam,
            libc::SYS_sched_setscheduler,
            libc::SYS_sched_setattr,
        ] {
            rules.push(rule(call, &[(0, process)]));
        }
        for of in [PROCESS, GROUP] {
            rules.push(rule(libc::SYS_setpriority, &[(0, of), (1, process)]));
            let of = of + FIRST_OF_IO_PRIORITY;
            rules.push(rule(libc::SYS_ioprio_set, &[(0, of), (1, process)]));
        }
    }
    rules
}

/// The filter for the container of the agent with this PID. It is installed beside others, which check the
/// architecture.
pub fn program(agent: u32) -> Vec<sock_filter> {
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const JUMP_IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    const REFUSED: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs();
    let instruction = |code: u32, k: u32, otherwise: u8| sock_filter {
        code: u16::try_from(code).expect("codes are 16 bits wide"),
        jt: 0,
        jf: otherwise,
        k,
    };
    let mut program = Vec::new();
    for rule in rules(agent) {
        let call = u32::try_from(rule.call).expect("call numbers are small");
        let tests = std::iter::once((CALL_OFFSET, call)).chain(
            rule.conditions
                .iter()
                .map(|(index, value)| (argument_offset(*index), *value)),
        );
        // The instructions left in a rule: two for each test after this one, and the return.
        let mut left = u8::try_from(rule.conditions.len() * 2 + 1).expect("rules are short");
        for (offset, value) in tests {
            program.push(instruction(LOAD, offset, 0));
            program.push(instruction(JUMP_IF_EQUAL, value, left));
            left = left.saturating_sub(2);
        }
        program.push(instruction(RETURN, REFUSED, 0));
    }
    program.push(instruction(RETURN, libc::SECCOMP_RET_ALLOW, 0));
    program
}

/// The offset of the system call number in the kernel's `seccomp_data`.
const CALL_OFFSET: u32 = 0;

/// The offset of the lower 32 bits of an argument. PIDs have 32 bits, and the kernel ignores the rest as well.
fn argument_offset(index: u32) -> u32 {
    const FIRST: u32 = 16;
    FIRST + index * 8 + if cfg!(target_endian = "big") { 4 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The program's verdict on a call, as the kernel would compute it.
    fn judge(program: &[sock_filter], call: c_long, arguments: [u32; 2]) -> u32 {
        let (mut at, mut loaded) = (0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            match u32::from(code) & 7 {
                libc::BPF_LD => {
                    loaded = if k == CALL_OFFSET {
                        u32::try_from(call).unwrap()
                    } else {
                        let index = (0..2).find(|index| argument_offset(*index) == k);
                        arguments[usize::try_from(index.unwrap()).unwrap()]
                    };
                }
                libc::BPF_JMP => at += usize::from(if loaded == k { jt } else { jf }),
                _ => return k,
            }
        }
    }

    #[test]
    fn the_agent_and_the_first_process_are_protected_and_others_are_not() {
        let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs();
        for agent in [1, 77] {
            let program = program(agent);
            for call in [
                libc::SYS_prlimit64,
                libc::SYS_sched_setaffinity,
                libc::SYS_sched_setparam,
                libc::SYS_sched_setscheduler,
            ] {
                for (process, answer) in [
                    (0, libc::SECCOMP_RET_ALLOW),
                    (1, refused),
                    (agent, refused),
                    (78, libc::SECCOMP_RET_ALLOW),
                ] {
                    assert_eq!(judge(&program, call, [process, 0]), answer, "{call}");
                }
            }
            for (call, first) in [(libc::SYS_setpriority, 0), (libc::SYS_ioprio_set, 1)] {
                for (of, who, answer) in [
                    (0, agent, refused),
                    (1, agent, refused),
                    (0, 1, refused),
                    (2, 0, refused),
                    (2, 1000, refused),
                    (0, 0, libc::SECCOMP_RET_ALLOW),
                    (1, 0, libc::SECCOMP_RET_ALLOW),
                    (0, 78, libc::SECCOMP_RET_ALLOW),
                ] {
                    assert_eq!(
                        judge(&program, call, [of + first, who]),
                        answer,
                        "{call} {of} {who}"
                    );
                }
            }
            assert_eq!(
                judge(&program, libc::SYS_read, [1, 1]),
                libc::SECCOMP_RET_ALLOW
            );
        }
    }
}
