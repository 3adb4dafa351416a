//! Pseudo-terminals: the master side for the server, and the helper process that makes the slave side a command's
//! controlling terminal.
//!
//! Only the process that will own a controlling terminal can acquire it, between fork and exec. Running code there needs
//! `unsafe`, so the server starts itself again as a helper, which becomes a session leader, acquires the
//! terminal on its standard input, and executes the command.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;
use tokio::net::unix::pipe::{Receiver, Sender};

use crate::protocol::exit_code;

/// The first argument that makes the program run as the helper.
const HELPER_ARGUMENT: &str = "__sandboxd-terminal";

/// The server's side of a pseudo-terminal.
#[derive(Debug)]
pub struct Terminal {
    /// Only for the size; bytes go through `reader` and `writer`.
    master: OwnedFd,
}

/// The ends of a new terminal.
#[derive(Debug)]
pub struct TerminalEnds {
    pub terminal: Terminal,
    /// The terminal's output. Once every process has closed the terminal, reading fails with EIO, which is the end of
    /// the output.
    pub reader: Receiver,
    /// The terminal's input.
    pub writer: Sender,
    /// The command's side.
    pub slave: OwnedFd,
}

impl Terminal {
    /// A new terminal of the given size.
    pub fn open(rows: u16, cols: u16) -> io::Result<TerminalEnds> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags)?;
        rustix::pty::grantpt(&master)?;
        rustix::pty::unlockpt(&master)?;
        let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
        rustix::io::ioctl_fionbio(&master, true)?;
        // A terminal is polled, read and written like a pipe.
        let reader = Receiver::from_owned_fd_unchecked(master.try_clone()?)?;
        let writer = Sender::from_owned_fd_unchecked(master.try_clone()?)?;
        let terminal = Self { master };
        terminal.resize(rows, cols)?;
        Ok(TerminalEnds {
            terminal,
            reader,
            writer,
            slave,
        })
    }

    pub fn resize(&self, rows: u16, cols: u16) -> io::Result<()> {
        let size = Winsize {
            ws_row: rows,
            ws_col: cols,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        Ok(rustix::termios::tcsetwinsize(&self.master, size)?)
    }
}

/// The end-of-file character, which ends terminal input.
pub const END_OF_FILE: u8 = 0x04;

/// The command that runs `program` on the terminal `slave`.
pub fn command_on(slave: OwnedFd, program: &str, arguments: &[String]) -> io::Result<Command> {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("sandboxd")
        .arg(HELPER_ARGUMENT)
        .arg(program)
        .args(arguments);
    command
        .stdin(Stdio::from(slave.try_clone()?))
        .stdout(Stdio::from(slave.try_clone()?))
        .stderr(Stdio::from(slave));
    Ok(command)
}

/// Runs the helper if this process was started as one; returns only if the command cannot be
/// executed. Every program that runs the server calls this first in `main`.
#[must_use]
pub fn run_terminal_helper() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != HELPER_ARGUMENT {
        return None;
    }
    let error = become_command(arguments);
    eprintln!("sandboxd: {error}");
    let code = if error.kind() == io::ErrorKind::NotFound {
        exit_code::NOT_FOUND
    } else {
        exit_code::CANNOT_RUN
    };
    Some(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)))
}

fn become_command(mut arguments: impl Iterator<Item = OsString>) -> io::Error {
    let Some(program) = arguments.next() else {
        return io::Error::new(io::ErrorKind::InvalidInput, "no command was given");
    };
    if let Err(errno) = rustix::process::setsid() {
        return errno.into();
    }
    if let Err(errno) = rustix::process::ioctl_tiocsctty(rustix::stdio::stdin()) {
        return errno.into();
    }
    let error = Command::new(&program).args(arguments).exec();
    io::Error::new(
        error.kind(),
        format!("{}: {error}", program.to_string_lossy()),
    )
}
