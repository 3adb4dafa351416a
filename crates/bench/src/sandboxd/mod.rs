//! `bench sandboxd`: the static binary that sandboxes run: its size, its start, its memory, and commands per second.

mod commands;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::process;
use crate::sample::{Sample, milliseconds};
use crate::table::{Table, bytes};
use commands::Measurement;

/// The number of starts that are measured.
const STARTS: usize = 30;

/// The timeout of a start.
const DEADLINE: Duration = Duration::from_secs(10);
/// Numbers of concurrent clients.
const CLIENTS: [usize; 3] = [1, 8, 64];
const TIME_FOR_EACH: Duration = Duration::from_secs(5);
/// The budgets: size, resident memory while idle, and median time from the start to the first response.
const LARGEST: u64 = 6 << 20;
const MOST_RESIDENT: u64 = 8 << 20;
const SLOWEST_START: Duration = Duration::from_millis(10);

/// All figures.
struct Figures {
    size: u64,
    /// Commands, by number of clients.
    commands: Vec<Measurement>,
    start: Sample,
    /// Resident memory while idle, in bytes.
    resident: u64,
}

impl Figures {
    /// The missed budgets.
    fn missed(&self) -> Vec<String> {
        let mut missed = Vec::new();
        for (what, measured, budget) in [
            ("the binary has", self.size, LARGEST),
            ("idle, it holds", self.resident, MOST_RESIDENT),
        ] {
            if measured > budget {
                missed.push(format!(
                    "{what} {}, at most {} was asked",
                    bytes(measured),
                    bytes(budget)
                ));
            }
        }
        let start = self.start.percentile(50);
        if start > SLOWEST_START {
            missed.push(format!(
                "from its start to its first answer it takes {}, at most {} was asked",
                milliseconds(start),
                milliseconds(SLOWEST_START)
            ));
        }
        missed
    }
}

/// Measures and prints. Returns the missed budgets. To be called outside of a tokio runtime.
pub fn execute() -> anyhow::Result<Vec<String>> {
    let directory = tempfile::tempdir()?;
    let figures = measure(directory.path(), STARTS)?;
    print_commands(&figures.commands);
    println!(
        "binary {}; resident, idle, {}; start to first answer {}",
        bytes(figures.size),
        bytes(figures.resident),
        figures.start
    );
    Ok(figures.missed())
}

fn print_commands(measured: &[Measurement]) {
    let mut table = Table::new(&["CLIENTS", "COMMANDS/S", "P50", "P99"]);
    for figure in measured {
        table.row(vec![
            figure.clients.to_string(),
            format!("{:.0}", figure.commands_per_second),
            milliseconds(figure.p50),
            milliseconds(figure.p99),
        ]);
    }
    print!("{}", table.render());
}

/// Starts the runtime `rounds` times, then once more to run commands.
fn measure(directory: &Path, rounds: usize) -> anyhow::Result<Figures> {
    let program = container_runtime::assets::unpack(&directory.join("bin"))?.sandboxd;
    let mut figures = Figures {
        size: std::fs::metadata(&program)?.len(),
        commands: Vec::new(),
        start: Sample::default(),
        resident: 0,
    };
    for _ in 0..rounds {
        let begin = Instant::now();
        let (child, _) = start(&program, directory)?;
        figures.start.add(begin.elapsed());
        figures.resident = process::resident(child.0.id())?;
    }
    let (_child, address) = start(&program, directory)?;
    figures.commands = commands::run(address, &CLIENTS, TIME_FOR_EACH)?;
    Ok(figures)
}

/// Starts the runtime and waits for its first response.
fn start(program: &Path, directory: &Path) -> anyhow::Result<(Running, SocketAddr)> {
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let child = Command::new(program)
        .arg("--base-dir")
        .arg(directory.join("base"))
        .args(["--init-listen", "none", "--listen", &address.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let child = Running(child);
    await_answer(address, Instant::now() + DEADLINE)?;
    Ok((child, address))
}

/// Kills the process on drop.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_that_sandboxes_run_is_small() {
        let directory = tempfile::tempdir().unwrap();
        let program = container_runtime::assets::unpack(directory.path())
            .unwrap()
            .sandboxd;
        let size = std::fs::metadata(program).unwrap().len();
        assert!(size <= LARGEST, "{size} bytes");
    }

    #[test]
    fn what_misses_the_budget_is_named() {
        let mut start = Sample::default();
        start.add(SLOWEST_START);
        let mut figures = Figures {
            size: LARGEST,
            commands: Vec::new(),
            start,
            resident: MOST_RESIDENT,
        };
        assert_eq!(figures.missed(), Vec::<String>::new());
        figures.size += 1;
        figures.resident += 1;
        figures.start = Sample::default();
        figures.start.add(SLOWEST_START * 2);
        let missed = figures.missed();
        assert_eq!(missed.len(), 3, "{missed:?}");
        assert!(
            missed[0].contains("binary") && missed[2].contains("20.00 ms"),
            "{missed:?}"
        );
    }
}
