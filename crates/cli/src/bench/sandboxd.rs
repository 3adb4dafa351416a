//! The in-sandbox runtime as sandboxes run it: the static binary, from its start to its first answer, and what it holds of memory.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::ensure;

use super::Sample;

/// How long a start may take before it counts as failed.
const DEADLINE: Duration = Duration::from_secs(10);

/// What was measured of the binary.
pub struct Figures {
    pub size: u64,
    pub start: Sample,
    /// Resident memory once it has answered and is idle, in bytes.
    pub resident: u64,
}

/// Starts the runtime `rounds` times, one after the other.
pub fn measure(directory: &Path, rounds: usize) -> anyhow::Result<Figures> {
    let program = node::assets::unpack(&directory.join("bin"))?.sandboxd;
    let mut figures = Figures {
        size: std::fs::metadata(&program)?.len(),
        start: Sample::default(),
        resident: 0,
    };
    for _ in 0..rounds {
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let begin = Instant::now();
        let child = Command::new(&program)
            .arg("--base-dir")
            .arg(directory.join("base"))
            .args(["--init-listen", "none", "--listen", &address.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let child = Running(child);
        await_answer(address, begin + DEADLINE)?;
        figures.start.add(begin.elapsed());
        figures.resident = super::process::resident(child.0.id())?;
    }
    Ok(figures)
}

/// Ends the process when the measurement is over.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn await_answer(address: SocketAddr, deadline: Instant) -> anyhow::Result<()> {
    loop {
        if let Ok(mut stream) = TcpStream::connect(address) {
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            ensure!(answer.contains("200 OK"), "an unexpected answer: {answer}");
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "it did not listen in time");
        std::thread::sleep(Duration::from_micros(200));
    }
}
