//! Worker threads that serve clients' connections, each with its own runtime.
//!
//! A connection stays on its thread, together with the connections to sandboxes that its requests use: no request moves between
//! threads, and no thread is woken to steal work. The registry of sandboxes is shared by all.

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::rustls::ServerConfig;

use crate::shutdown::ShutdownSignal;

thread_local! {
    static WORKER: Cell<usize> = const { Cell::new(0) };
}

/// The number of the current worker thread; 0 for every other thread.
pub fn current() -> usize {
    WORKER.get()
}

/// An accepted client connection.
pub struct Accepted<S> {
    pub stream: S,
    pub peer: SocketAddr,
    /// The TLS configuration, for a TLS listener.
    pub tls: Option<Arc<ServerConfig>>,
    /// The signal that asks the connection to close.
    pub stop: Arc<ShutdownSignal>,
}

impl<S> Accepted<S> {
    fn over<T>(self, change: impl FnOnce(S) -> io::Result<T>) -> io::Result<Accepted<T>> {
        Ok(Accepted {
            stream: change(self.stream)?,
            peer: self.peer,
            tls: self.tls,
            stop: self.stop,
        })
    }
}

/// The worker threads. They end when this is dropped and their connections have closed.
pub struct Workers {
    queues: Vec<mpsc::UnboundedSender<Accepted<std::net::TcpStream>>>,
    threads: Vec<JoinHandle<()>>,
    next: usize,
}

impl Workers {
    /// Starts `count` threads. Each calls `serve_connection` for its connections, on its own runtime, and `finish` when no more can come.
    pub fn start<W, F, Finish>(count: usize, serve_connection: W, finish: F) -> io::Result<Self>
    where
        W: Fn(Accepted<TcpStream>) + Clone + Send + 'static,
        F: Fn() -> Finish + Clone + Send + 'static,
        Finish: Future<Output = ()>,
    {
        let mut workers = Self {
            queues: Vec::new(),
            threads: Vec::new(),
            next: 0,
        };
        for number in 1..=count {
            let (queue, mut accepted) = mpsc::unbounded_channel::<Accepted<std::net::TcpStream>>();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let (serve_connection, finish) = (serve_connection.clone(), finish.clone());
            let thread = std::thread::Builder::new().name(format!("router-{number}"));
            let thread = thread.spawn(move || {
                WORKER.set(number);
                runtime.block_on(async {
                    while let Some(connection) = accepted.recv().await {
                        match connection.over(TcpStream::from_std) {
                            Ok(connection) => serve_connection(connection),
                            Err(error) => tracing::warn!(%error, "a connection cannot be registered with its thread"),
                        }
                    }
                    finish().await;
                });
            })?;
            workers.queues.push(queue);
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// Hands a connection to the next thread, round-robin.
    pub fn dispatch(&mut self, connection: Accepted<TcpStream>) -> io::Result<()> {
        let connection = connection.over(TcpStream::into_std)?;
        self.next = (self.next + 1) % self.queues.len();
        self.queues[self.next]
            .send(connection)
            .map_err(|_| io::Error::other("the worker thread has ended"))
    }

    /// Accepts no more connections. The returned function waits until the last connection has closed.
    pub fn close(self) -> impl FnOnce() {
        drop(self.queues);
        move || {
            for thread in self.threads {
                let _ = thread.join();
            }
        }
    }
}
