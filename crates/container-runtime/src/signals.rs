//! Signal names as pods use them (`stopSignal`). Pure.

use libc::c_int;

/// The named signals, without the prefix `SIG`.
const NAMED: [(&str, c_int); 34] = [
    ("ABRT", libc::SIGABRT),
    ("ALRM", libc::SIGALRM),
    ("BUS", libc::SIGBUS),
    ("CHLD", libc::SIGCHLD),
    ("CLD", libc::SIGCHLD),
    ("CONT", libc::SIGCONT),
    ("FPE", libc::SIGFPE),
    ("HUP", libc::SIGHUP),
    ("ILL", libc::SIGILL),
    ("INT", libc::SIGINT),
    ("IO", libc::SIGIO),
    ("IOT", libc::SIGIOT),
    ("KILL", libc::SIGKILL),
    ("PIPE", libc::SIGPIPE),
    ("POLL", libc::SIGPOLL),
    ("PROF", libc::SIGPROF),
    ("PWR", libc::SIGPWR),
    ("QUIT", libc::SIGQUIT),
    ("SEGV", libc::SIGSEGV),
    ("STKFLT", libc::SIGSTKFLT),
    ("STOP", libc::SIGSTOP),
    ("SYS", libc::SIGSYS),
    ("TERM", libc::SIGTERM),
    ("TRAP", libc::SIGTRAP),
    ("TSTP", libc::SIGTSTP),
    ("TTIN", libc::SIGTTIN),
    ("TTOU", libc::SIGTTOU),
    ("URG", libc::SIGURG),
    ("USR1", libc::SIGUSR1),
    ("USR2", libc::SIGUSR2),
    ("VTALRM", libc::SIGVTALRM),
    ("WINCH", libc::SIGWINCH),
    ("XCPU", libc::SIGXCPU),
    ("XFSZ", libc::SIGXFSZ),
];

/// The number of a signal: `SIGTERM`, or a real-time signal such as `SIGRTMIN+3` or `SIGRTMAX-3`.
pub fn number(name: &str) -> Option<c_int> {
    let short = name.strip_prefix("SIG")?;
    let named = NAMED.iter().find(|(known, _)| *known == short);
    if let Some((_, number)) = named {
        return Some(*number);
    }
    let (first, last) = (libc::SIGRTMIN(), libc::SIGRTMAX());
    let offset = |text: &str, sign: char| match text {
        "" => Some(0),
        text => text.strip_prefix(sign)?.parse::<c_int>().ok(),
    };
    let number = if let Some(above) = short.strip_prefix("RTMIN") {
        first.checked_add(offset(above, '+')?)?
    } else {
        last.checked_sub(offset(short.strip_prefix("RTMAX")?, '-')?)?
    };
    (first..=last).contains(&number).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_signal_names_of_kubernetes_are_known() {
        for (name, expected) in [
            ("SIGTERM", Some(15)),
            ("SIGPWR", Some(libc::SIGPWR)),
            ("SIGRTMIN", Some(libc::SIGRTMIN())),
            ("SIGRTMIN+15", Some(libc::SIGRTMIN() + 15)),
            ("SIGRTMAX-14", Some(libc::SIGRTMAX() - 14)),
            ("SIGRTMAX+1", None),
            ("SIGRTMIN+99", None),
            ("SIGRTMIN--1", None),
            ("TERM", None),
            ("SIGNAL", None),
        ] {
            assert_eq!(number(name), expected, "{name}");
        }
    }
}
