use sdk::{Client, Connection, CreateOptions, Options};

#[tokio::main]
async fn main() -> Result<(), sdk::Error> {
    let client = Client::connect(Options {
        connection: Connection::Direct {
            url: "http://127.0.0.1:8080".into(),
        },
        ..Options::default()
    })
    .await?;
    use_a_sandbox(&client).await
}

pub async fn use_a_sandbox(client: &Client) -> Result<(), sdk::Error> {
    let sandbox = client
        .create(CreateOptions::from_template("python-runtime-template"))
        .await?;
    sandbox.files().write("data.py", "x = 42").await?;
    let code = "import data; print(data.x)";
    let result = sandbox.commands().run_code(code).await?;
    assert_eq!(result.stdout, "42\n");
    sandbox.suspend().await?;

    // Later, perhaps in another process:
    let again = client.attach(sandbox.id()).await?;
    again.resume().await?;
    again.terminate().await
}
