//! PID 1 of a container: runs its command, writes its log, reaps orphans, and serves exec and attach.
//!
//! The agent is already confined when it starts, so every process it starts is confined in the same way: an exec never enters
//! the container from outside. It is one thread with one `poll` loop. A peer that does not read is no longer read from, so
//! no buffer grows without bound.
//!
//! In a pod with a shared PID namespace the agent is not PID 1: that is another process, which has no command and
//! only reaps ([`holder`]).
//!
//! ```text
//!            ┌── signals: SIGCHLD reaps, the others go to the command
//!   poll ────┼── the command's output ──► log file, attached sessions
//!            ├── the listener ──► new session
//!            └── sessions: frames in, frames out, and their exec's streams
//! ```

mod command;
mod entrance;
mod holder;
mod log;
mod session;
mod spawn;

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, WaitOptions, WaitStatus, wait};
use shim_protocol::{ContainerExit, ExitReport, LaunchAnswer, Process};

use self::command::Command;
use self::session::{Session, Watch};
use crate::failure::{During, Failure};
use crate::syscalls;

/// The descriptor number of the agent's own binary, set by the launcher; close-on-exec.
pub const AGENT_DESCRIPTOR: i32 = 8;

const FORWARDED_SIGNALS: [i32; 7] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGWINCH,
];

/// How long the agent pauses after the kernel refused a resource, for example a descriptor at the limit.
const BACK_OFF: Duration = Duration::from_millis(100);

/// Pauses if `poll` fails, so that retrying does not become a busy loop.
fn back_off(error: rustix::io::Errno) {
    if error != rustix::io::Errno::INTR {
        std::thread::sleep(BACK_OFF);
    }
}

/// The exit code of a container that could not be started.
const START_FAILED: i32 = 128;

/// The descriptors that the launcher left open, in their order.
struct Inheritance {
    configuration: OwnedFd,
    listener: OwnedFd,
    log: OwnedFd,
    exit: OwnedFd,
    status: OwnedFd,
}

pub fn run() -> ExitCode {
    let inheritance = Inheritance {
        configuration: syscalls::inherited(3),
        listener: syscalls::inherited(4),
        log: syscalls::inherited(5),
        exit: syscalls::inherited(6),
        status: syscalls::inherited(7),
    };
    let mut status = File::from(inheritance.status);
    let say = |status: &mut File, answer: &LaunchAnswer| {
        let _ = serde_json::to_vec(answer).map(|text| status.write_all(&text));
    };
    let (process, signals) = match prepare(inheritance.configuration) {
        Ok(prepared) => prepared,
        Err(failure) => {
            say(
                &mut status,
                &LaunchAnswer::Failed {
                    message: failure.to_string(),
                    pid: None,
                },
            );
            return ExitCode::FAILURE;
        }
    };
    if process.arguments.is_empty() {
        say(&mut status, &LaunchAnswer::Started { pid: 1 });
        drop(status);
        return holder::hold(signals.as_fd());
    }
    let command = match Command::start(&process, File::from(inheritance.log)) {
        Ok(command) => command,
        Err(refusal) => {
            let message = refusal.message;
            say(
                &mut status,
                &LaunchAnswer::CommandFailed {
                    message,
                    code: refusal.code,
                    pid: 1,
                },
            );
            return ExitCode::from(u8::try_from(refusal.code).unwrap_or(1));
        }
    };
    if let Some(entrance) = &process.entrance
        && !entrance::await_container(entrance, &process, command.pid())
    {
        return refused_outside(command, &mut status);
    }
    say(&mut status, &LaunchAnswer::Started { pid: 1 });
    drop(status);
    let agent = Agent {
        process,
        signals,
        listener: UnixListener::from(inheritance.listener),
        exit: File::from(inheritance.exit),
        command,
        sessions: Vec::new(),
        buffer: vec![0; 32 << 10],
        accept_after: None,
    };
    agent.serve()
}

/// Reports that another runtime could not start the container. The reason is in the log, where the node looks for it.
fn refused_outside(mut command: Command, status: &mut File) -> ExitCode {
    let mut buffer = vec![0; 32 << 10];
    command.drain(&mut buffer, &mut []);
    let answer = LaunchAnswer::CommandFailed {
        message: String::new(),
        code: START_FAILED,
        pid: 1,
    };
    let _ = serde_json::to_vec(&answer).map(|text| status.write_all(&text));
    ExitCode::FAILURE
}

fn prepare(configuration: OwnedFd) -> Result<(Process, OwnedFd), Failure> {
    syscalls::forbid_inspection().during("hiding the agent from its own user")?;
    // In a PID namespace shared by the pod the agent is not PID 1, and must still reap its container's orphans.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    let mut text = String::new();
    let mut configuration = File::from(configuration);
    configuration
        .rewind()
        .during("rewinding the configuration")?;
    configuration
        .read_to_string(&mut text)
        .during("reading the configuration")?;
    let process = serde_json::from_str(&text).during("parsing the configuration")?;
    let mut signals = FORWARDED_SIGNALS.to_vec();
    signals.push(libc::SIGCHLD);
    let signals = syscalls::signal_descriptor(&signals).during("preparing signals")?;
    Ok((process, signals))
}

struct Agent {
    process: Process,
    signals: OwnedFd,
    listener: UnixListener,
    exit: File,
    command: Command,
    sessions: Vec<Session>,
    buffer: Vec<u8>,
    /// Until when no connection is accepted, because the last accept failed.
    accept_after: Option<Instant>,
}

/// The owner of a descriptor in the poll set.
#[derive(Clone, Copy)]
enum Source {
    Signals,
    Listener,
    CommandOutput,
    CommandInput,
    Session(usize, Watch),
}

impl Agent {
    fn serve(mut self) -> ExitCode {
        loop {
            for (source, events) in self.poll() {
                self.handle(source, events);
            }
            self.sessions.retain(|session| !session.is_finished());
            if let Some(exit) = self.command.exit() {
                return self.finish(exit);
            }
        }
    }

    fn poll(&self) -> Vec<(Source, PollFlags)> {
        let mut sources: Vec<(Source, BorrowedFd<'_>, PollFlags)> =
            vec![(Source::Signals, self.signals.as_fd(), PollFlags::IN)];
        let rest = self
            .accept_after
            .map(|until| until.saturating_duration_since(Instant::now()))
            .filter(|rest| !rest.is_zero());
        if rest.is_none() {
            sources.push((Source::Listener, self.listener.as_fd(), PollFlags::IN));
        }
        let pause = self.command.pause();
        if pause.is_none() {
            sources.extend(
                self.command
                    .outputs()
                    .map(|output| (Source::CommandOutput, output, PollFlags::IN)),
            );
        }
        sources.extend(
            self.command
                .wants_input()
                .map(|input| (Source::CommandInput, input, PollFlags::OUT)),
        );
        for (index, session) in self.sessions.iter().enumerate() {
            let accepts_stdin = session.is_exec() || self.command.accepts_input();
            session.watch(accepts_stdin, |watch, descriptor, events| {
                sources.push((Source::Session(index, watch), descriptor, events));
            });
        }
        let mut set: Vec<PollFd<'_>> = sources
            .iter()
            .map(|(_, descriptor, events)| PollFd::from_borrowed_fd(*descriptor, *events))
            .collect();
        let timeout = pause.into_iter().chain(rest).min();
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        if let Err(error) = poll(&mut set, timeout.as_ref()) {
            back_off(error);
            // All descriptors are non-blocking, so each can simply be tried.
            return sources
                .into_iter()
                .filter(|(_, _, events)| !events.is_empty())
                .map(|(source, _, events)| (source, events))
                .collect();
        }
        let results = set.iter().map(PollFd::revents).collect::<Vec<_>>();
        sources
            .into_iter()
            .zip(results)
            .filter(|(_, events)| !events.is_empty())
            .map(|((source, _, _), events)| (source, events))
            .collect()
    }

    fn handle(&mut self, source: Source, _events: PollFlags) {
        match source {
            Source::Signals => self.take_signals(),
            Source::Listener => self.accept(),
            Source::CommandOutput => self
                .command
                .read_output(&mut self.buffer, &mut self.sessions),
            Source::CommandInput => self.command.write_input(),
            Source::Session(index, watch) => {
                let Some(session) = self.sessions.get_mut(index) else {
                    return;
                };
                session.advance(watch, &mut self.buffer, &self.process, &mut self.command);
            }
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => self.sessions.extend(Session::new(stream)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The client stays in the queue, and the listener stays ready.
                Err(_) => {
                    self.accept_after = Instant::now().checked_add(BACK_OFF);
                    return;
                }
            }
        }
    }

    fn take_signals(&mut self) {
        for signal in syscalls::pending_signals(self.signals.as_fd()) {
            if signal == libc::SIGCHLD {
                self.reap();
            } else {
                let _ = syscalls::send_signal(self.command.pid(), signal);
            }
        }
    }

    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let report = exit_report(status);
            if pid.as_raw_nonzero().get() == self.command.pid() {
                self.command.ended(report);
            } else {
                self.end_exec(pid, report);
            }
        }
    }

    fn end_exec(&mut self, pid: Pid, report: ExitReport) {
        let pid = pid.as_raw_nonzero().get();
        if let Some(session) = self
            .sessions
            .iter_mut()
            .find(|session| session.exec_pid() == Some(pid))
        {
            session.exec_ended(report, &mut self.buffer);
        }
    }

    /// Ends the container after its command: drains the output, reports the exit code, and ends all sessions.
    fn finish(mut self, exit: ExitReport) -> ExitCode {
        self.command.drain(&mut self.buffer, &mut self.sessions);
        let finished = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        let record = ContainerExit {
            code: exit.code,
            signal: exit.signal,
            finished_at_ns: u64::try_from(finished.as_nanos()).unwrap_or(u64::MAX),
        };
        let _ = serde_json::to_vec(&record).map(|text| self.exit.write_all(&text));
        for session in &mut self.sessions {
            session.command_ended(exit);
        }
        if rustix::process::getpid() != Pid::INIT {
            holder::end_descendants();
        }
        ExitCode::from(u8::try_from(exit.code).unwrap_or(255))
    }
}

fn exit_report(status: WaitStatus) -> ExitReport {
    match status.terminating_signal() {
        Some(signal) => ExitReport {
            code: 128 + signal,
            signal: Some(signal),
        },
        None => ExitReport {
            code: status.exit_status().unwrap_or(0),
            signal: None,
        },
    }
}
