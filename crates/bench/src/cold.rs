//! `bench cold`: from the claim to Ready, without a warm pool.

use std::time::{Duration, Instant};

use crate::agent_sandbox::Up;
use crate::sample::Sample;

/// Creates and deletes one sandbox after the other, with a pause in between. The quickstart's pool is full and idle meanwhile.
pub async fn measure(up: &Up, rounds: usize, pause: Duration) -> anyhow::Result<Sample> {
    let client = up.sandboxes()?;
    up.await_warm_pool().await?;
    let mut sample = Sample::default();
    for _ in 0..rounds {
        let begin = Instant::now();
        let options =
            sdk::CreateOptions::from_template(up.template()?).warm_pool(sdk::WarmPool::None);
        let sandbox = client.create(options).await?;
        sample.add(begin.elapsed());
        sandbox.terminate().await?;
        tokio::time::sleep(pause).await;
    }
    Ok(sample)
}
