//! Starts one process inside the container, with pipes or a terminal.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;
use shim_protocol::WindowSize;

use crate::syscalls::{self, ChildImage, Side};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why a command cannot run, with the exit code that a shell would return.
#[derive(Debug)]
pub struct Refusal {
    pub message: String,
    pub code: i32,
}

/// The program to start.
#[derive(Debug)]
pub struct Program<'a> {
    pub arguments: &'a [String],
    pub environment: &'a [(String, String)],
    pub working_directory: &'a str,
    pub terminal: bool,
    pub stdin: bool,
    pub window: Option<WindowSize>,
}

/// A started process and the agent's ends of its streams, all non-blocking.
#[derive(Debug)]
pub struct Spawned {
    pub pid: i32,
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    /// The master side of the terminal, for input and output.
    pub terminal: Option<OwnedFd>,
}

struct Streams {
    child: [OwnedFd; 3],
    stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    terminal: Option<OwnedFd>,
}

/// Starts `program` and waits until it has been executed or has failed.
pub fn spawn(program: &Program<'_>) -> Result<Spawned, Refusal> {
    let name = program
        .arguments
        .first()
        .map(String::as_str)
        .unwrap_or_default();
    let failed = |error: io::Error| Refusal {
        message: format!("starting {name:?}: {error}"),
        code: 126,
    };
    let environment = strings(
        program
            .environment
            .iter()
            .map(|(key, value)| format!("{key}={value}")),
    )
    .map_err(failed)?;
    let arguments = strings(program.arguments.iter().cloned()).map_err(failed)?;
    let candidates = candidates(name, program.environment).map_err(failed)?;
    let streams = if program.terminal {
        terminal(program.window)
    } else {
        pipes(program.stdin)
    };
    let streams = streams.map_err(|error| failed(error.into()))?;
    let (report, reported) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
    match syscalls::fork().map_err(failed)? {
        Side::Child => {
            let [stdin, stdout, stderr] = &streams.child;
            let prepared = syscalls::prepare_child(
                [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
                reported.as_fd(),
                program.terminal,
            );
            let error = match prepared
                .and_then(|()| Ok(rustix::process::chdir(program.working_directory)?))
            {
                Err(error) => error,
                Ok(()) => execute_first(&candidates, &arguments, &environment),
            };
            let _ = rustix::io::write(
                &reported,
                &error.raw_os_error().unwrap_or(libc::EIO).to_ne_bytes(),
            );
            std::process::exit(127)
        }
        Side::Parent(pid) => {
            drop(reported);
            let pid = pid.as_raw_nonzero().get();
            let mut number = [0; 4];
            match File::from(report).read_exact(&mut number) {
                // The pipe was closed on exec: the program runs.
                Err(_) => Ok(Spawned {
                    pid,
                    stdin: streams.stdin,
                    stdout: streams.stdout,
                    stderr: streams.stderr,
                    terminal: streams.terminal,
                }),
                Ok(()) => Err(refusal(
                    program,
                    name,
                    &io::Error::from_raw_os_error(i32::from_ne_bytes(number)),
                )),
            }
        }
    }
}

fn refusal(program: &Program<'_>, name: &str, error: &io::Error) -> Refusal {
    let code = if error.raw_os_error() == Some(libc::ENOENT) {
        127
    } else {
        126
    };
    let message = if Path::new(program.working_directory).is_dir() {
        format!("exec: {name:?}: {error}")
    } else {
        format!("working directory {:?}: {error}", program.working_directory)
    };
    Refusal { message, code }
}

fn strings(values: impl Iterator<Item = String>) -> io::Result<Vec<CString>> {
    values
        .map(|value| CString::new(value).map_err(io::Error::from))
        .collect()
}

/// The paths that a command's name may refer to, in the order of `PATH`.
fn candidates(name: &str, environment: &[(String, String)]) -> io::Result<Vec<CString>> {
    if name.contains('/') || name.is_empty() {
        return strings(std::iter::once(name.to_owned()));
    }
    let path = environment
        .iter()
        .find(|(key, _)| key == "PATH")
        .map_or(DEFAULT_PATH, |(_, value)| value);
    strings(
        path.split(':')
            .filter(|directory| !directory.is_empty())
            .map(|directory| format!("{directory}/{name}")),
    )
}

fn execute_first(
    candidates: &[CString],
    arguments: &[CString],
    environment: &[CString],
) -> io::Error {
    let pointers = |strings: &[CString]| {
        strings
            .iter()
            .map(|string| string.as_ptr())
            .chain(std::iter::once(std::ptr::null()))
            .collect::<Vec<_>>()
    };
    let arguments = pointers(arguments);
    let environment = pointers(environment);
    let mut answer = io::Error::from_raw_os_error(libc::ENOENT);
    for path in candidates {
        let error = syscalls::execute(&ChildImage {
            path,
            arguments: &arguments,
            environment: &environment,
        });
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => {}
            Some(libc::EACCES) => answer = error,
            _ => return error,
        }
    }
    answer
}

fn pipes(stdin: bool) -> rustix::io::Result<Streams> {
    let own = |descriptor: OwnedFd| -> rustix::io::Result<OwnedFd> {
        rustix::fs::fcntl_setfl(&descriptor, OFlags::NONBLOCK)?;
        Ok(descriptor)
    };
    let (child_in, own_in) = if stdin {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        (read, Some(own(write)?))
    } else {
        (
            rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?,
            None,
        )
    };
    let (own_out, child_out) = pipe_with(PipeFlags::CLOEXEC)?;
    let (own_error, child_error) = pipe_with(PipeFlags::CLOEXEC)?;
    Ok(Streams {
        child: [child_in, child_out, child_error],
        stdin: own_in,
        stdout: Some(own(own_out)?),
        stderr: Some(own(own_error)?),
        terminal: None,
    })
}

fn terminal(window: Option<WindowSize>) -> rustix::io::Result<Streams> {
    let master =
        rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    rustix::pty::unlockpt(&master)?;
    let path = rustix::pty::ptsname(&master, Vec::new())?;
    let open = || {
        rustix::fs::open(
            path.as_c_str(),
            OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC,
            Mode::empty(),
        )
    };
    let child = [open()?, open()?, open()?];
    if let Some(window) = window {
        resize(&master, window)?;
    }
    rustix::fs::fcntl_setfl(&master, OFlags::NONBLOCK | OFlags::RDWR)?;
    Ok(Streams {
        child,
        stdin: None,
        stdout: None,
        stderr: None,
        terminal: Some(master),
    })
}

pub fn resize(terminal: &OwnedFd, window: WindowSize) -> rustix::io::Result<()> {
    let size = Winsize {
        ws_row: window.rows,
        ws_col: window.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    rustix::termios::tcsetwinsize(terminal, size)
}
