//! The Rust of docs/quickstart.md: below this line it is that page's, to the letter.

use sdk::process::{Event, Start};
use sdk::{Client, CreateOptions, Options};

#[tokio::main]
async fn main() -> Result<(), sdk::Error> {
    // The cluster of KUBECONFIG, reached through its API: works wherever kubectl works.
    let client = Client::connect(Options::default()).await?;
    let sandbox = client
        .create(CreateOptions::from_pool("python-warmpool"))
        .await?;

    sandbox.files().write("data.py", "answer = 42").await?;
    let result = sandbox
        .commands()
        .run_code("import data; print(data.answer)")
        .await?;
    print!("{}", result.stdout);

    // An interactive process, its output as it comes.
    let mut process = sandbox
        .process()
        .start(Start::argv(["echo", "streamed"]))
        .await?;
    while let Some(event) = process.next().await? {
        if let Event::Stdout(bytes) = event {
            print!("{}", String::from_utf8_lossy(&bytes));
        }
    }

    // Another program could take it up by its id.
    let same = client.attach(sandbox.id()).await?;
    println!("{}", same.status().await?.phase);
    same.terminate().await
}
