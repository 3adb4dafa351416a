//! Starts commands in a container of another runtime (`runc`, `runsc`), and checks whether it runs.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, WaitId, WaitIdOptions};
use serde_json::{Value, json};
use shim_protocol::{Entrance, ExecRequest, Process};

/// The pause before the runtime is asked again.
const PAUSE: Duration = Duration::from_millis(5);

/// The file that describes a command to the runtime; removed with the command.
#[derive(Debug)]
pub struct Description(PathBuf);

impl Drop for Description {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The runtime's command line that runs a command in the container.
pub fn exec(entrance: &Entrance, request: &ExecRequest) -> io::Result<(Vec<String>, Description)> {
    let mut process: Value = serde_json::from_str(&entrance.process)?;
    process["args"] = json!(request.arguments);
    process["terminal"] = json!(request.terminal);
    let own = process["env"].as_array().cloned().unwrap_or_default();
    let replaced = |variable: &Value| {
        let key = variable.as_str().and_then(|text| text.split_once('='));
        key.is_some_and(|(key, _)| request.environment.iter().any(|(other, _)| other == key))
    };
    let inherited = own.into_iter().filter(|variable| !replaced(variable));
    let added = request.environment.iter();
    let added = added.map(|(key, value)| json!(format!("{key}={value}")));
    process["env"] = inherited.chain(added).collect();
    let number = (0..u32::MAX)
        .find(|number| !path(entrance, *number).exists())
        .unwrap_or_default();
    let file = path(entrance, number);
    std::fs::write(&file, process.to_string())?;
    let mut words = entrance.exec.clone();
    words.extend([file.display().to_string(), entrance.identifier.clone()]);
    Ok((words, Description(file)))
}

fn path(entrance: &Entrance, number: u32) -> PathBuf {
    entrance.directory.join(format!("exec-{number}.json"))
}

/// Waits until the container runs. False if the runtime, which is `command`, ended before it had started the container.
pub fn await_container(entrance: &Entrance, process: &Process, command: i32) -> bool {
    let started = entrance.directory.join("pid");
    loop {
        let over = has_ended(command);
        if over || (started.exists() && is_running(entrance, process)) {
            return started.exists();
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether a child has ended; does not reap it.
fn has_ended(pid: i32) -> bool {
    let Some(pid) = Pid::from_raw(pid) else {
        return true;
    };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(rustix::process::waitid(WaitId::Pid(pid), options), Ok(None))
}

fn is_running(entrance: &Entrance, process: &Process) -> bool {
    let Some((program, arguments)) = entrance.state.split_first() else {
        return true;
    };
    let asked = std::process::Command::new(program)
        .args(arguments)
        .env_clear()
        .envs(process.environment.iter().cloned())
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let state: Option<Value> = asked
        .ok()
        .and_then(|output| serde_json::from_slice(&output.stdout).ok());
    state.is_some_and(|state| state["status"] == "running")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commands_arguments_and_variables_override_the_containers() {
        let directory = std::env::temp_dir().join(format!("entrance-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let entrance = Entrance {
            exec: ["runc", "exec", "--process"].map(str::to_owned).to_vec(),
            state: Vec::new(),
            identifier: "c1".to_owned(),
            process: r#"{"args": ["old"], "env": ["A=1", "B=2"], "cwd": "/x", "terminal": false}"#
                .to_owned(),
            directory: directory.clone(),
        };
        let request = ExecRequest {
            arguments: vec!["new".to_owned()],
            environment: vec![("B".to_owned(), "3".to_owned())],
            terminal: true,
            stdin: false,
            window: None,
        };
        let (words, description) = exec(&entrance, &request).unwrap();
        let (other, second) = exec(&entrance, &request).unwrap();
        assert_ne!(words[3], other[3], "two concurrent commands have two files");
        assert_eq!((words[0].as_str(), words[4].as_str()), ("runc", "c1"));
        let text = std::fs::read_to_string(&words[3]).unwrap();
        let described: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            described,
            json!({"args": ["new"], "env": ["A=1", "B=3"], "cwd": "/x", "terminal": true})
        );
        drop(description);
        assert!(!std::path::Path::new(&words[3]).exists());
        drop(second);
        std::fs::remove_dir(&directory).unwrap();
    }
}
