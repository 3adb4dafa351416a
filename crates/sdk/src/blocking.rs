//! The same client for programs that are not async: every call blocks until its result is available. It owns a small runtime
//! and contains no logic; the async items of the same names are documented in the rest of the crate.
//!
#![doc = concat!("```no_run\n", include_str!("../examples/blocking.rs"), "```")]
//!
//! # Caveats
//!
//! Calls panic inside an async task: there, use the async client.

use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use tokio::runtime::Runtime;

use crate::claim::CreateOptions;
use crate::client::ListOptions;
use crate::commands::{ExecutionResult, RunOptions};
use crate::connector::CallOptions;
use crate::error::{Error, ErrorKind, Key};
use crate::files::{FileEntry, FileStat};
use crate::metrics::Metrics;
use crate::options::Options;
use crate::process::{Event, Exit, Output, Start};
use crate::status::Status;
use crate::{commands, files, process};

/// The runtime that executes calls. It ends with the last handle.
#[derive(Clone, Debug)]
struct Waiter(Arc<OwnedRuntime>);

#[derive(Debug)]
struct OwnedRuntime(Option<Runtime>);

impl Waiter {
    fn new() -> Result<Self, Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("sandbox-client")
            .enable_all()
            .build();
        match runtime {
            Ok(runtime) => Ok(Self(Arc::new(OwnedRuntime(Some(runtime))))),
            Err(cause) => Err(ErrorKind::Transport {
                operation: "start the runtime",
                cause: cause.into(),
            }
            .into()),
        }
    }

    fn wait<F: Future>(&self, work: F) -> F::Output {
        let runtime = self.0.0.as_ref();
        runtime
            .expect("the runtime is removed only when the last handle is dropped")
            .block_on(work)
    }
}

impl Drop for OwnedRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // Dropping a runtime waits for its threads, which panics inside an async context.
            runtime.shutdown_background();
        }
    }
}

/// Creates sandboxes and attaches to existing ones. See [`crate::Client`].
#[derive(Clone, Debug)]
pub struct Client {
    waiter: Waiter,
    client: crate::Client,
}

impl Client {
    /// A client that uses this connection to a Kubernetes API. The runtime in which the connection was created must stay alive.
    pub fn new(kubernetes: kube::Client, options: Options) -> Result<Self, Error> {
        Ok(Self {
            waiter: Waiter::new()?,
            client: crate::Client::new(kubernetes, options)?,
        })
    }

    /// See [`crate::Client::connect`].
    pub fn connect(options: Options) -> Result<Self, Error> {
        let waiter = Waiter::new()?;
        let client = waiter.wait(crate::Client::connect(options))?;
        Ok(Self { waiter, client })
    }

    fn sandbox(&self, sandbox: crate::Sandbox) -> Sandbox {
        Sandbox {
            waiter: self.waiter.clone(),
            sandbox,
        }
    }

    /// See [`crate::Client::create`].
    pub fn create(&self, request: CreateOptions) -> Result<Sandbox, Error> {
        let created = self.waiter.wait(self.client.create(request))?;
        Ok(self.sandbox(created))
    }

    /// See [`crate::Client::attach`].
    pub fn attach(&self, id: &str) -> Result<Sandbox, Error> {
        let attached = self.waiter.wait(self.client.attach(id))?;
        Ok(self.sandbox(attached))
    }

    /// See [`crate::Client::attach_in`].
    pub fn attach_in(&self, namespace: &str, id: &str) -> Result<Sandbox, Error> {
        let attached = self.waiter.wait(self.client.attach_in(namespace, id))?;
        Ok(self.sandbox(attached))
    }

    /// See [`crate::Client::active`].
    pub fn active(&self) -> Vec<Sandbox> {
        let active = self.client.active().into_iter();
        active.map(|sandbox| self.sandbox(sandbox)).collect()
    }

    /// See [`crate::Client::list`].
    pub fn list(&self) -> Result<Vec<String>, Error> {
        self.waiter.wait(self.client.list())
    }

    /// See [`crate::Client::list_in`].
    pub fn list_in(&self, namespace: &str) -> Result<Vec<String>, Error> {
        self.waiter.wait(self.client.list_in(namespace))
    }

    /// See [`crate::Client::list_with`].
    pub fn list_with(&self, options: &ListOptions) -> Result<Vec<String>, Error> {
        self.waiter.wait(self.client.list_with(options))
    }

    /// See [`crate::Client::metrics`].
    pub fn metrics(&self) -> &Metrics {
        self.client.metrics()
    }

    /// See [`crate::Client::delete`].
    pub fn delete(&self, id: &str) -> Result<(), Error> {
        self.waiter.wait(self.client.delete(id))
    }

    /// See [`crate::Client::delete_in`].
    pub fn delete_in(&self, namespace: &str, id: &str) -> Result<(), Error> {
        self.waiter.wait(self.client.delete_in(namespace, id))
    }

    /// See [`crate::Client::delete_all`].
    pub fn delete_all(&self) -> Vec<Error> {
        self.waiter.wait(self.client.delete_all())
    }

    /// See [`crate::Client::enable_auto_cleanup`].
    pub fn enable_auto_cleanup(&self) -> Result<crate::AutoCleanup, Error> {
        self.waiter
            .wait(async { self.client.enable_auto_cleanup() })
    }
}

/// A sandbox. See [`crate::Sandbox`].
#[derive(Clone, Debug)]
pub struct Sandbox {
    waiter: Waiter,
    sandbox: crate::Sandbox,
}

impl Sandbox {
    pub fn id(&self) -> &str {
        self.sandbox.id()
    }

    pub fn namespace(&self) -> &str {
        self.sandbox.namespace()
    }

    pub fn key(&self) -> &Key {
        self.sandbox.key()
    }

    pub fn sandbox_name(&self) -> Option<String> {
        self.sandbox.sandbox_name()
    }

    /// See [`crate::Sandbox::pod_name`].
    pub fn pod_name(&self) -> Result<String, Error> {
        self.waiter.wait(self.sandbox.pod_name())
    }

    pub fn is_open(&self) -> bool {
        self.sandbox.is_open()
    }

    /// See [`crate::Sandbox::open`].
    pub fn open(&self) -> Result<(), Error> {
        self.waiter.wait(self.sandbox.open())
    }

    /// See [`crate::Sandbox::disconnect`].
    pub fn disconnect(&self) -> Result<(), Error> {
        self.waiter.wait(self.sandbox.disconnect())
    }

    /// See [`crate::Sandbox::terminate`].
    pub fn terminate(&self) -> Result<(), Error> {
        self.waiter.wait(self.sandbox.terminate())
    }

    /// See [`crate::Sandbox::status`].
    pub fn status(&self) -> Result<Status, Error> {
        self.waiter.wait(self.sandbox.status())
    }

    /// See [`crate::Sandbox::suspend`].
    pub fn suspend(&self) -> Result<(), Error> {
        self.waiter.wait(self.sandbox.suspend())
    }

    /// See [`crate::Sandbox::suspend_with`].
    pub fn suspend_with(&self, strategy: crate::SuspensionType) -> Result<(), Error> {
        self.waiter.wait(self.sandbox.suspend_with(strategy))
    }

    /// See [`crate::Sandbox::resume`].
    pub fn resume(&self) -> Result<(), Error> {
        self.waiter.wait(self.sandbox.resume())
    }

    pub fn commands(&self) -> Commands {
        Commands {
            waiter: self.waiter.clone(),
            commands: self.sandbox.commands(),
        }
    }

    pub fn files(&self) -> Files {
        Files {
            waiter: self.waiter.clone(),
            files: self.sandbox.files(),
        }
    }

    pub fn process(&self) -> Processes {
        Processes {
            waiter: self.waiter.clone(),
            processes: self.sandbox.process(),
        }
    }
}

/// Runs commands. See [`crate::commands::Commands`].
#[derive(Clone, Debug)]
pub struct Commands {
    waiter: Waiter,
    commands: commands::Commands,
}

impl Commands {
    pub fn run(&self, command: &str) -> Result<ExecutionResult, Error> {
        self.waiter.wait(self.commands.run(command))
    }

    pub fn run_with(&self, command: &str, options: &RunOptions) -> Result<ExecutionResult, Error> {
        self.waiter.wait(self.commands.run_with(command, options))
    }

    pub fn run_program(&self, program: &str, arguments: &[&str]) -> Result<ExecutionResult, Error> {
        self.waiter
            .wait(self.commands.run_program(program, arguments))
    }

    pub fn run_code(&self, code: &str) -> Result<ExecutionResult, Error> {
        self.waiter.wait(self.commands.run_code(code))
    }
}

/// Copies files. See [`crate::files::Files`].
#[derive(Clone, Debug)]
pub struct Files {
    waiter: Waiter,
    files: files::Files,
}

impl Files {
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> Result<(), Error> {
        self.waiter.wait(self.files.write(name, content))
    }

    pub fn write_with(
        &self,
        name: &str,
        content: impl AsRef<[u8]>,
        options: &CallOptions,
    ) -> Result<(), Error> {
        self.waiter
            .wait(self.files.write_with(name, content, options))
    }

    pub fn write_path(&self, path: &str, content: impl AsRef<[u8]>) -> Result<(), Error> {
        self.waiter.wait(self.files.write_path(path, content))
    }

    pub fn read(&self, path: &str) -> Result<Bytes, Error> {
        self.waiter.wait(self.files.read(path))
    }

    pub fn read_with(&self, path: &str, options: &CallOptions) -> Result<Bytes, Error> {
        self.waiter.wait(self.files.read_with(path, options))
    }

    pub fn list(&self, path: &str) -> Result<Vec<FileEntry>, Error> {
        self.waiter.wait(self.files.list(path))
    }

    pub fn stat(&self, path: &str) -> Result<FileStat, Error> {
        self.waiter.wait(self.files.stat(path))
    }

    pub fn delete(&self, path: &str) -> Result<(), Error> {
        self.waiter.wait(self.files.delete(path))
    }

    pub fn delete_recursively(&self, path: &str) -> Result<(), Error> {
        self.waiter.wait(self.files.delete_recursively(path))
    }

    pub fn rename(&self, from: &str, to: &str) -> Result<(), Error> {
        self.waiter.wait(self.files.rename(from, to))
    }

    pub fn make_directory(&self, path: &str) -> Result<(), Error> {
        self.waiter.wait(self.files.make_directory(path))
    }

    pub fn exists(&self, path: &str) -> Result<bool, Error> {
        self.waiter.wait(self.files.exists(path))
    }
}

/// Starts processes. See [`crate::process::Processes`].
#[derive(Clone, Debug)]
pub struct Processes {
    waiter: Waiter,
    processes: process::Processes,
}

impl Processes {
    pub fn start(&self, start: Start) -> Result<Process, Error> {
        let process = self.waiter.wait(self.processes.start(start))?;
        Ok(Process {
            waiter: self.waiter.clone(),
            process,
        })
    }

    pub fn output(&self, start: Start, limit: usize) -> Result<Output, Error> {
        self.waiter.wait(self.processes.output(start, limit))
    }
}

/// A running process. See [`crate::process::Process`].
#[derive(Debug)]
pub struct Process {
    waiter: Waiter,
    process: process::Process,
}

impl Process {
    pub fn pid(&self) -> Option<u32> {
        self.process.pid()
    }

    pub fn control(&self) -> Control {
        Control {
            waiter: self.waiter.clone(),
            control: self.process.control().clone(),
        }
    }

    /// The next event, or `None` after the exit.
    pub fn next_event(&mut self) -> Result<Option<Event>, Error> {
        self.waiter.wait(self.process.next())
    }

    pub fn output(self, limit: usize) -> Result<Output, Error> {
        self.waiter.wait(self.process.output(limit))
    }

    pub fn wait(self) -> Result<Exit, Error> {
        self.waiter.wait(self.process.wait())
    }
}

/// Writes to a process and controls it, also from another thread. See [`crate::process::Control`].
#[derive(Clone, Debug)]
pub struct Control {
    waiter: Waiter,
    control: process::Control,
}

impl Control {
    pub fn write(&self, bytes: impl AsRef<[u8]>) -> Result<(), Error> {
        self.waiter.wait(self.control.write(bytes))
    }

    pub fn close_stdin(&self) -> Result<(), Error> {
        self.waiter.wait(self.control.close_stdin())
    }

    pub fn resize(&self, rows: u16, cols: u16) -> Result<(), Error> {
        self.waiter.wait(self.control.resize(rows, cols))
    }

    pub fn signal(&self, name: &str) -> Result<(), Error> {
        self.waiter.wait(self.control.signal(name))
    }

    pub fn kill(&self) -> Result<(), Error> {
        self.waiter.wait(self.control.kill())
    }
}
