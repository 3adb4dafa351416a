//! Serves the files of a directory by HTTP on loopback, and can answer with other bytes than the file has.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;

/// What happens to a file on its way.
type Change = dyn Fn(&str, Vec<u8>) -> Option<Vec<u8>> + Send + Sync;

/// A server that runs until the process ends.
pub struct Server {
    address: SocketAddr,
}

impl Server {
    /// `change` gets each path with its bytes, and returns what is sent; `None` is "not found".
    pub fn start(
        directory: &Path,
        change: impl Fn(&str, Vec<u8>) -> Option<Vec<u8>> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let directory = directory.to_owned();
        let change: Arc<Change> = Arc::new(change);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that goes away early is its own business.
                let _ = answer(stream, &directory, &*change);
            }
        });
        Ok(Self { address })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

fn answer(stream: TcpStream, directory: &Path, change: &Change) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let path = line.split(' ').nth(1).unwrap_or_default();
    let path = path.trim_start_matches('/').to_owned();
    let mut header = String::new();
    while reader.read_line(&mut header)? > 2 {
        header.clear();
    }
    let is_inside = !path.split('/').any(|part| part == "..");
    let found = fs::read(directory.join(&path)).ok().filter(|_| is_inside);
    let mut stream = reader.into_inner();
    match found.and_then(|bytes| change(&path, bytes)) {
        Some(bytes) => {
            let length = bytes.len();
            write!(
                stream,
                "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
            )?;
            stream.write_all(&bytes)
        }
        None => stream
            .write_all(b"HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"),
    }
}
