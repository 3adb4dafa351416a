use sdk::{CreateOptions, Options, blocking};

fn main() -> Result<(), sdk::Error> {
    let client = blocking::Client::connect(Options::default())?;
    print!("{}", say_hello(&client)?);
    Ok(())
}

pub fn say_hello(client: &blocking::Client) -> Result<String, sdk::Error> {
    let sandbox = client.create(CreateOptions::from_pool("python-warmpool"))?;
    let result = sandbox.commands().run("echo hello")?;
    sandbox.terminate()?;
    Ok(result.stdout)
}
