//! Threads that carry clients' connections, each with a runtime of its own.
//!
//! A connection stays on its thread, and so do the connections to sandboxes that its requests use: no request is handed from one
//! thread to another, and no thread is woken to take work from another. What sandboxes there are is shared by all.

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::rustls::ServerConfig;

use crate::stopping::Moment;

thread_local! {
    static WORKER: Cell<usize> = const { Cell::new(0) };
}

/// The thread that is running; 0 for every thread that is none of these.
pub fn current() -> usize {
    WORKER.get()
}

/// A client that has connected.
pub struct Arrival<S> {
    pub stream: S,
    pub peer: SocketAddr,
    /// How to speak TLS with it, if at all.
    pub tls: Option<Arc<ServerConfig>>,
    /// When it is to come to an end.
    pub stop: Arc<Moment>,
}

impl<S> Arrival<S> {
    fn over<T>(self, change: impl FnOnce(S) -> io::Result<T>) -> io::Result<Arrival<T>> {
        Ok(Arrival {
            stream: change(self.stream)?,
            peer: self.peer,
            tls: self.tls,
            stop: self.stop,
        })
    }
}

/// The threads. They end when this is dropped and their connections are over.
pub struct Workers {
    lines: Vec<mpsc::UnboundedSender<Arrival<std::net::TcpStream>>>,
    threads: Vec<JoinHandle<()>>,
    next: usize,
}

impl Workers {
    /// Starts `count` threads. Each calls `welcome` for its arrivals, on its own runtime, and `finish` when no more can come.
    pub fn start<W, F, Finish>(count: usize, welcome: W, finish: F) -> io::Result<Self>
    where
        W: Fn(Arrival<TcpStream>) + Clone + Send + 'static,
        F: Fn() -> Finish + Clone + Send + 'static,
        Finish: Future<Output = ()>,
    {
        let mut workers = Self {
            lines: Vec::new(),
            threads: Vec::new(),
            next: 0,
        };
        for number in 1..=count {
            let (line, mut arrivals) = mpsc::unbounded_channel::<Arrival<std::net::TcpStream>>();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let (welcome, finish) = (welcome.clone(), finish.clone());
            let thread = std::thread::Builder::new().name(format!("router-{number}"));
            let thread = thread.spawn(move || {
                WORKER.set(number);
                runtime.block_on(async {
                    while let Some(arrival) = arrivals.recv().await {
                        match arrival.over(TcpStream::from_std) {
                            Ok(arrival) => welcome(arrival),
                            Err(error) => tracing::warn!(%error, "a connection cannot be taken up"),
                        }
                    }
                    finish().await;
                });
            })?;
            workers.lines.push(line);
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// Gives a connection to the next thread in turn.
    pub fn carry(&mut self, arrival: Arrival<TcpStream>) -> io::Result<()> {
        let arrival = arrival.over(TcpStream::into_std)?;
        self.next = (self.next + 1) % self.lines.len();
        self.lines[self.next]
            .send(arrival)
            .map_err(|_| io::Error::other("the thread for it has ended"))
    }

    /// Takes no more arrivals. What is returned ends with the last connection.
    pub fn close(self) -> impl FnOnce() {
        drop(self.lines);
        move || {
            for thread in self.threads {
                let _ = thread.join();
            }
        }
    }
}
