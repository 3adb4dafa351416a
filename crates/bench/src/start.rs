//! `bench start`: how soon `up` serves on an empty data directory, how soon its pool is full, its idle cost, and the size of the program,
//! each judged against its budget.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::agent_sandbox::{self, Quickstart, Up};
use crate::idle;
use crate::table::{Table, bytes};

const READY_BUDGET: Duration = Duration::from_secs(2);
const POOL_BUDGET: Duration = Duration::from_secs(5);
const MEMORY_BUDGET: u64 = 60 << 20;
const CPU_BUDGET_PERCENT: f64 = 1.0;
const BINARY_BUDGET: u64 = 40 << 20;

/// One figure, and whether it is within its budget.
struct Judged {
    what: &'static str,
    measured: String,
    budget: String,
    is_met: bool,
}

/// Starts `up`, measures it, and stops it with all its sandboxes.
pub async fn run(directory: &Path, idling: Duration) -> anyhow::Result<()> {
    let size = std::fs::metadata(agent_sandbox::program()?)?.len();
    let begin = Instant::now();
    let up = Up::start(directory, Quickstart::TemplateAndPool).await?;
    let measured = measure(&up, begin, idling).await;
    let mut judged = vec![within(
        "all parts serve after",
        up.ready_after,
        READY_BUDGET,
    )];
    judged.extend(up.stop_after(measured).await?);
    judged.push(Judged {
        what: "size of the program",
        measured: bytes(size),
        budget: bytes(BINARY_BUDGET),
        is_met: size <= BINARY_BUDGET,
    });
    print(&judged)
}

async fn measure(up: &Up, begin: Instant, idling: Duration) -> anyhow::Result<Vec<Judged>> {
    up.await_warm_pool().await?;
    let full = begin.elapsed();
    let idle = idle::of_process(up.ready.pid, idling).await?;
    Ok(vec![
        within("the pool is full after", full, POOL_BUDGET),
        Judged {
            what: "resident, idle",
            measured: bytes(idle.resident),
            budget: bytes(MEMORY_BUDGET),
            is_met: idle.resident <= MEMORY_BUDGET,
        },
        Judged {
            what: "of a CPU, idle",
            measured: format!("{:.2} %", idle.share),
            budget: format!("{CPU_BUDGET_PERCENT} %"),
            is_met: idle.share < CPU_BUDGET_PERCENT,
        },
    ])
}

fn within(what: &'static str, measured: Duration, budget: Duration) -> Judged {
    Judged {
        what,
        measured: format!("{} ms", measured.as_millis()),
        budget: format!("{} ms", budget.as_millis()),
        is_met: measured <= budget,
    }
}

fn print(judged: &[Judged]) -> anyhow::Result<()> {
    let mut table = Table::new(&["WHAT", "MEASURED", "BUDGET", ""]);
    for figure in judged {
        let verdict = if figure.is_met { "kept" } else { "exceeded" };
        table.row(vec![
            figure.what.to_owned(),
            figure.measured.clone(),
            figure.budget.clone(),
            verdict.to_owned(),
        ]);
    }
    print!("{}", table.render());
    let exceeded = judged.iter().filter(|figure| !figure.is_met).count();
    ensure!(
        exceeded == 0,
        "{exceeded} of {} budgets are exceeded",
        judged.len()
    );
    Ok(())
}
