//! One connection to the agent: an exec, an attachment to the command, or a control request.

use std::fs::File;
use std::io::{IoSliceMut, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::PollFlags;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde::Serialize;
use shim_protocol::{
    AttachRequest, ExecRequest, ExitReport, FailureReport, Frame, FrameError, FrameKind, Process,
    SignalRequest, StartedReport, WindowSize, decode, encode,
};

use super::command::{Command, write_pending};
use super::entrance::{self, Description};
use super::spawn::{self, Program, Spawned};
use crate::syscalls;

/// The limit of pending output: above it, an exec's output is not read.
const MAX_PENDING_OUTPUT: usize = 256 << 10;
/// An attached client with more pending output is disconnected, so that it does not block the container's command.
const MAX_ATTACHED_OUTPUT: usize = 1 << 20;
/// The limit of pending input: above it, a client's input is not read.
const MAX_PENDING_INPUT: usize = 64 << 10;

/// The descriptor of a session that became ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watch {
    Client,
    ExecInput,
    ExecOutput,
}

#[derive(Debug)]
enum Role {
    Undecided,
    Exec(Exec),
    Attached,
    /// Only pending output is left to send.
    Closing,
}

#[derive(Debug)]
struct Exec {
    spawned: Spawned,
    pending_input: Vec<u8>,
    input_ended: bool,
    /// Exists while another runtime may read the file.
    _description: Option<Description>,
}

#[derive(Debug)]
pub struct Session {
    stream: UnixStream,
    received: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    pending: Vec<u8>,
    role: Role,
    client_gone: bool,
}

impl Session {
    pub fn new(stream: UnixStream) -> Option<Self> {
        stream.set_nonblocking(true).ok()?;
        Some(Self {
            stream,
            received: Vec::new(),
            descriptors: Vec::new(),
            pending: Vec::new(),
            role: Role::Undecided,
            client_gone: false,
        })
    }

    pub fn is_exec(&self) -> bool {
        matches!(self.role, Role::Exec(_))
    }

    pub fn is_attached(&self) -> bool {
        matches!(self.role, Role::Attached)
    }

    pub fn exec_pid(&self) -> Option<i32> {
        if let Role::Exec(exec) = &self.role {
            Some(exec.spawned.pid)
        } else {
            None
        }
    }

    pub fn is_finished(&self) -> bool {
        self.client_gone || (matches!(self.role, Role::Closing) && self.pending.is_empty())
    }

    /// Lists every descriptor to poll, with its events.
    pub fn watch<'a>(
        &'a self,
        accepts_stdin: bool,
        mut add: impl FnMut(Watch, BorrowedFd<'a>, PollFlags),
    ) {
        let mut client = PollFlags::empty();
        let has_room = match &self.role {
            Role::Exec(exec) => exec.pending_input.len() < MAX_PENDING_INPUT,
            _ => accepts_stdin,
        };
        if has_room {
            client |= PollFlags::IN;
        }
        if !self.pending.is_empty() {
            client |= PollFlags::OUT;
        }
        add(Watch::Client, self.stream.as_fd(), client);
        let Role::Exec(exec) = &self.role else { return };
        if !exec.pending_input.is_empty()
            && let Some(input) = exec.input()
        {
            add(Watch::ExecInput, input.as_fd(), PollFlags::OUT);
        }
        if self.pending.len() < MAX_PENDING_OUTPUT {
            for output in [
                &exec.spawned.stdout,
                &exec.spawned.stderr,
                &exec.spawned.terminal,
            ]
            .into_iter()
            .flatten()
            {
                add(Watch::ExecOutput, output.as_fd(), PollFlags::IN);
            }
        }
    }

    pub fn advance(
        &mut self,
        watch: Watch,
        buffer: &mut [u8],
        process: &Process,
        command: &mut Command,
    ) {
        match watch {
            Watch::Client => {
                self.flush();
                self.receive(buffer);
                self.interpret(process, command);
            }
            Watch::ExecInput => {
                if let Role::Exec(exec) = &mut self.role {
                    exec.write_input();
                }
            }
            Watch::ExecOutput => {
                self.read_output(buffer);
            }
        }
        self.flush();
    }

    fn receive(&mut self, buffer: &mut [u8]) {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let length = match recvmsg(&self.stream, &mut slices, &mut ancillary, flags) {
            Ok(message) => message.bytes,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
            Err(_) => 0,
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        if length == 0 {
            self.client_gone = true;
        }
        self.received.extend_from_slice(&buffer[..length]);
    }

    fn interpret(&mut self, process: &Process, command: &mut Command) {
        loop {
            match decode(&mut self.received) {
                Ok(None) => break,
                Ok(Some(frame)) => {
                    if let Err(error) = self.apply(&frame, process, command) {
                        self.refuse(&error.to_string(), 1);
                    }
                }
                Err(error) => {
                    self.refuse(&error.to_string(), 1);
                    self.received.clear();
                    break;
                }
            }
        }
        if self.client_gone && self.is_attached() {
            command.input_ended();
        }
    }

    fn apply(
        &mut self,
        frame: &Frame,
        process: &Process,
        command: &mut Command,
    ) -> Result<(), FrameError> {
        match (frame.kind, &mut self.role) {
            (FrameKind::Exec, Role::Undecided) => self.start(&frame.parse()?, process),
            (FrameKind::Attach, Role::Undecided) => {
                let AttachRequest { .. } = frame.parse()?;
                self.role = Role::Attached;
                self.send(FrameKind::Started, &StartedReport { pid: command.pid() });
            }
            (FrameKind::SignalCommand, Role::Undecided) => {
                let SignalRequest { signal } = frame.parse()?;
                let _ = syscalls::send_signal(command.pid(), signal);
                self.finish(FrameKind::Done, b"{}");
            }
            (FrameKind::ReplaceLog, Role::Undecided) => match self.descriptors.pop() {
                Some(file) => {
                    command.replace_log(File::from(file));
                    self.finish(FrameKind::Done, b"{}");
                }
                None => self.refuse("the request has no file descriptor", 1),
            },
            (FrameKind::Stdin, Role::Exec(exec)) => {
                exec.pending_input.extend_from_slice(&frame.payload);
                exec.write_input();
            }
            (FrameKind::StdinClosed, Role::Exec(exec)) => {
                exec.input_ended = true;
                exec.write_input();
            }
            (FrameKind::Resize, Role::Exec(exec)) => {
                let window: WindowSize = frame.parse()?;
                if let Some(terminal) = &exec.spawned.terminal {
                    let _ = spawn::resize(terminal, window);
                }
            }
            (FrameKind::SignalExec, Role::Exec(exec)) => {
                let SignalRequest { signal } = frame.parse()?;
                // An exec is the leader of its own session, and so of its own process group.
                let _ = syscalls::send_signal(-exec.spawned.pid, signal);
            }
            (FrameKind::Stdin, Role::Attached) => command.feed(&frame.payload),
            (FrameKind::StdinClosed, Role::Attached) => command.input_ended(),
            (FrameKind::Resize, Role::Attached) => command.resize(frame.parse()?),
            // Late frames for an exec that has ended are normal; anything else is a protocol error.
            (_, Role::Closing) => {}
            (kind, _) => self.refuse(&format!("unexpected frame {kind:?}"), 1),
        }
        Ok(())
    }

    fn start(&mut self, request: &ExecRequest, process: &Process) {
        let mut environment = process.environment.clone();
        for (key, value) in &request.environment {
            environment.retain(|(existing, _)| existing != key);
            environment.push((key.clone(), value.clone()));
        }
        let (arguments, environment, description) = match &process.entrance {
            None => (request.arguments.clone(), environment, None),
            Some(entrance) => match entrance::exec(entrance, request) {
                Ok((call, description)) => (call, process.environment.clone(), Some(description)),
                Err(error) => return self.refuse(&error.to_string(), 126),
            },
        };
        let started = spawn::spawn(&Program {
            arguments: &arguments,
            environment: &environment,
            working_directory: &process.working_directory,
            terminal: request.terminal,
            stdin: request.stdin,
            window: request.window,
        });
        match started {
            Ok(spawned) => {
                self.send(FrameKind::Started, &StartedReport { pid: spawned.pid });
                self.role = Role::Exec(Exec {
                    spawned,
                    pending_input: Vec::new(),
                    input_ended: false,
                    _description: description,
                });
            }
            Err(refusal) => self.refuse(&refusal.message, refusal.code),
        }
    }

    fn read_output(&mut self, buffer: &mut [u8]) -> bool {
        let Role::Exec(exec) = &mut self.role else {
            return false;
        };
        let mut progress = false;
        for (output, kind) in [
            (&mut exec.spawned.stdout, FrameKind::Stdout),
            (&mut exec.spawned.stderr, FrameKind::Stderr),
            (&mut exec.spawned.terminal, FrameKind::Stdout),
        ] {
            let Some(descriptor) = output.as_ref() else {
                continue;
            };
            match rustix::io::read(descriptor, &mut *buffer) {
                Ok(0) => *output = None,
                Ok(length) => {
                    encode(kind, &buffer[..length], &mut self.pending);
                    progress = true;
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(_) => *output = None,
            }
        }
        progress
    }

    /// Handles the end of an exec: everything it wrote is in its pipes by now; later output of its own children is not
    /// waited for.
    pub fn exec_ended(&mut self, report: ExitReport, buffer: &mut [u8]) {
        const MAX_BYTES: usize = 4 << 20;
        let already = self.pending.len();
        while self.pending.len() - already < MAX_BYTES && self.read_output(buffer) {}
        self.send(FrameKind::Exit, &report);
        self.role = Role::Closing;
        self.flush();
    }

    /// Handles the end of the container's command, which ends the container.
    pub fn command_ended(&mut self, report: ExitReport) {
        if self.is_attached() {
            self.send(FrameKind::Exit, &report);
        } else if self.is_exec() {
            self.refuse("the container has ended", 137);
        }
        let _ = self.stream.set_nonblocking(false);
        let _ = self
            .stream
            .set_write_timeout(Some(std::time::Duration::from_millis(100)));
        let _ = self.stream.write_all(&self.pending);
    }

    pub fn send_or_drop(&mut self, kind: FrameKind, data: &[u8]) {
        if self.pending.len() > MAX_ATTACHED_OUTPUT {
            self.client_gone = true;
            return;
        }
        encode(kind, data, &mut self.pending);
        self.flush();
    }

    fn send(&mut self, kind: FrameKind, message: &impl Serialize) {
        // Reports are plain structs, which always serialize.
        let payload = serde_json::to_vec(message).unwrap_or_default();
        encode(kind, &payload, &mut self.pending);
    }

    fn finish(&mut self, kind: FrameKind, payload: &[u8]) {
        encode(kind, payload, &mut self.pending);
        self.role = Role::Closing;
    }

    fn refuse(&mut self, message: &str, code: i32) {
        self.send(
            FrameKind::Failure,
            &FailureReport {
                message: message.to_owned(),
                code,
            },
        );
        self.role = Role::Closing;
    }

    fn flush(&mut self) {
        while !self.pending.is_empty() {
            match self.stream.write(&self.pending) {
                Ok(length) => drop(self.pending.drain(..length)),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.client_gone = true;
                    self.pending.clear();
                }
            }
        }
    }
}

impl Exec {
    fn input(&self) -> Option<&OwnedFd> {
        self.spawned
            .stdin
            .as_ref()
            .or(self.spawned.terminal.as_ref())
    }

    fn write_input(&mut self) {
        write_pending(
            self.spawned
                .stdin
                .as_ref()
                .or(self.spawned.terminal.as_ref()),
            &mut self.pending_input,
        );
        if self.input_ended && self.pending_input.is_empty() {
            self.spawned.stdin = None;
        }
    }
}
