//! The container's own command: its streams, its log, and its attached sessions.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use shim_protocol::{ExitReport, FrameKind, Process, WindowSize};

use super::log::{Log, Stream};
use super::session::Session;
use super::spawn::{self, Program, Refusal, Spawned};

/// The limit of queued input for a command that does not read; above it, attached sessions are not read.
const MAX_PENDING_INPUT: usize = 64 << 10;

#[derive(Debug)]
pub struct Command {
    spawned: Spawned,
    pending_input: Vec<u8>,
    close_input: bool,
    stdin_once: bool,
    exit: Option<ExitReport>,
    log: Log,
}

impl Command {
    pub fn start(process: &Process, log: File) -> Result<Self, Refusal> {
        let spawned = spawn::spawn(&Program {
            arguments: &process.arguments,
            environment: &process.environment,
            working_directory: &process.working_directory,
            terminal: process.terminal,
            stdin: process.stdin,
            window: None,
        })?;
        Ok(Self {
            spawned,
            pending_input: Vec::new(),
            close_input: false,
            stdin_once: process.stdin_once,
            exit: None,
            log: Log::new(log),
        })
    }

    pub fn pid(&self) -> i32 {
        self.spawned.pid
    }

    pub fn ended(&mut self, exit: ExitReport) {
        self.exit = Some(exit);
    }

    pub fn exit(&self) -> Option<ExitReport> {
        self.exit
    }

    pub fn replace_log(&mut self, file: File) {
        self.log.replace(file);
    }

    /// How long to stop reading the command's output, because the log file is full.
    pub fn pause(&self) -> Option<Duration> {
        self.log.pause(Instant::now())
    }

    pub fn outputs(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [
            &self.spawned.stdout,
            &self.spawned.stderr,
            &self.spawned.terminal,
        ]
        .into_iter()
        .flatten()
        .map(AsFd::as_fd)
    }

    fn input(&self) -> Option<&OwnedFd> {
        self.spawned
            .stdin
            .as_ref()
            .or(self.spawned.terminal.as_ref())
    }

    pub fn wants_input(&self) -> Option<BorrowedFd<'_>> {
        if self.pending_input.is_empty() {
            None
        } else {
            self.input().map(AsFd::as_fd)
        }
    }

    pub fn accepts_input(&self) -> bool {
        self.pending_input.len() < MAX_PENDING_INPUT
    }

    pub fn feed(&mut self, data: &[u8]) {
        if self.input().is_some() {
            self.pending_input.extend_from_slice(data);
            self.write_input();
        }
    }

    /// Handles the end of an attached client's input; the command sees it only if its pod sets `stdinOnce`.
    pub fn input_ended(&mut self) {
        if self.stdin_once {
            self.close_input = true;
            self.write_input();
        }
    }

    pub fn resize(&self, window: WindowSize) {
        if let Some(terminal) = &self.spawned.terminal {
            let _ = spawn::resize(terminal, window);
        }
    }

    pub fn write_input(&mut self) {
        write_pending(
            self.spawned
                .stdin
                .as_ref()
                .or(self.spawned.terminal.as_ref()),
            &mut self.pending_input,
        );
        if self.close_input && self.pending_input.is_empty() {
            self.spawned.stdin = None;
        }
    }

    pub fn read_output(&mut self, buffer: &mut [u8], sessions: &mut [Session]) {
        let Self { spawned, log, .. } = self;
        for (output, stream, kind) in [
            (&mut spawned.stdout, Stream::Stdout, FrameKind::Stdout),
            (&mut spawned.stderr, Stream::Stderr, FrameKind::Stderr),
            (&mut spawned.terminal, Stream::Stdout, FrameKind::Stdout),
        ] {
            let Some(descriptor) = output.as_ref() else {
                continue;
            };
            match rustix::io::read(descriptor, &mut *buffer) {
                Ok(0) => *output = None,
                Ok(length) => {
                    log.write(stream, &buffer[..length]);
                    for session in sessions.iter_mut().filter(|session| session.is_attached()) {
                        session.send_or_drop(kind, &buffer[..length]);
                    }
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                // Reading a terminal fails with EIO when its last user has closed it.
                Err(_) => *output = None,
            }
        }
    }

    /// Reads everything that the ended command left in its pipes.
    pub fn drain(&mut self, buffer: &mut [u8], sessions: &mut [Session]) {
        const MAX_BYTES: usize = 4 << 20;
        let mut total = 0;
        // A background process of the command may write forever; it will be killed next, so its output is limited.
        while total < MAX_BYTES && self.has_output() {
            self.read_output(buffer, sessions);
            total += buffer.len();
        }
        self.log.flush();
    }

    fn has_output(&self) -> bool {
        self.outputs().any(|output| {
            let mut set = [rustix::event::PollFd::from_borrowed_fd(
                output,
                rustix::event::PollFlags::IN,
            )];
            let none = rustix::event::Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            // If polling fails, reading decides.
            rustix::event::poll(&mut set, Some(&none)).map_or(true, |ready| ready > 0)
        })
    }
}

/// Writes as much of `pending` as the descriptor accepts; input that no process will read is dropped.
pub fn write_pending(descriptor: Option<&OwnedFd>, pending: &mut Vec<u8>) {
    let Some(descriptor) = descriptor else {
        pending.clear();
        return;
    };
    while !pending.is_empty() {
        match rustix::io::write(descriptor, pending) {
            Ok(length) => drop(pending.drain(..length)),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return,
            Err(_) => pending.clear(),
        }
    }
}
