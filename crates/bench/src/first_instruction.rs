//! `bench first-instruction`: from the claim to the first output of a command, through every part.

use std::time::Instant;

use anyhow::{Context, bail};
use sdk::process::{Event, Start};

use crate::agent_sandbox::Up;
use crate::sample::Sample;

pub async fn measure(up: &Up, rounds: usize) -> anyhow::Result<Sample> {
    let client = up.sandboxes()?;
    let mut sample = Sample::default();
    for _ in 0..rounds {
        up.await_warm_pool().await?;
        let begin = Instant::now();
        let options = sdk::CreateOptions::from_template(up.template()?);
        let sandbox = client.create(options).await?;
        let mut process = sandbox
            .process()
            .start(Start::argv(["echo", "first"]))
            .await?;
        loop {
            match process
                .next()
                .await?
                .context("the command ended without output")?
            {
                Event::Stdout(_) => break,
                Event::Stderr(_) => {}
                Event::Exit(exit) => bail!("the command ended without output: {exit:?}"),
            }
        }
        sample.add(begin.elapsed());
        sandbox.terminate().await?;
    }
    Ok(sample)
}
