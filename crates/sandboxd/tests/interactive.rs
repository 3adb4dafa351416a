//! Interactive execution from the client's side: the WebSocket protocol and the stream of JSON lines.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::net::TcpStream;
use std::time::Duration;

use sandboxd::protocol::{ClientMessage, Exit, ServerMessage, SignalName, Start, channel};
use serde_json::{Value, json};
use support::{Sandbox, body_of, status_of};
use tokio_tungstenite::tungstenite::{Message, WebSocket, client};

struct Connection {
    socket: WebSocket<TcpStream>,
    pid: u32,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl Connection {
    fn open(sandbox: &Sandbox) -> Self {
        let stream = TcpStream::connect(sandbox.sdk()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        let (socket, _) = client(format!("ws://{}/v1/exec", sandbox.sdk()), stream).unwrap();
        Self {
            socket,
            pid: 0,
            stdout: Vec::new(),
            stderr: Vec::new(),
        }
    }

    fn start(sandbox: &Sandbox, start: Start) -> Self {
        let mut connection = Self::open(sandbox);
        connection.send(&ClientMessage::Start(start));
        connection
    }

    fn send(&mut self, message: &ClientMessage) {
        self.socket
            .send(Message::text(serde_json::to_string(message).unwrap()))
            .unwrap();
    }

    fn type_in(&mut self, bytes: &[u8]) {
        let mut frame = vec![channel::STDIN];
        frame.extend_from_slice(bytes);
        self.socket.send(Message::Binary(frame.into())).unwrap();
    }

    /// Reads one frame. A signal to the test, such as SIGCHLD, must not end the wait.
    fn read(&mut self) -> Message {
        loop {
            match self.socket.read() {
                Err(tokio_tungstenite::tungstenite::Error::Io(error))
                    if error.kind() == std::io::ErrorKind::Interrupted => {}
                read => return read.expect("the connection stays open"),
            }
        }
    }

    /// Reads one frame; returns the exit if the frame is one.
    fn step(&mut self) -> Option<Exit> {
        match self.read() {
            Message::Binary(frame) if frame[0] == channel::STDOUT => {
                self.stdout.extend_from_slice(&frame[1..]);
            }
            Message::Binary(frame) if frame[0] == channel::STDERR => {
                self.stderr.extend_from_slice(&frame[1..]);
            }
            Message::Text(text) => match serde_json::from_str(&text).unwrap() {
                ServerMessage::Exit(exit) => return Some(exit),
                ServerMessage::Started { pid } => self.pid = pid,
                other => panic!("{other:?}"),
            },
            Message::Ping(_) => {}
            other => panic!("{other:?}"),
        }
        None
    }

    /// How many bytes the command has written so far.
    fn written(&self) -> u64 {
        let counters = std::fs::read_to_string(format!("/proc/{}/io", self.pid)).unwrap();
        let line = counters
            .lines()
            .find(|line| line.starts_with("wchar:"))
            .unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    fn until_exit(&mut self) -> Exit {
        loop {
            if let Some(exit) = self.step() {
                return exit;
            }
        }
    }

    fn until_output(&mut self, expected: &str) {
        while !String::from_utf8_lossy(&self.stdout).contains(expected) {
            assert_eq!(
                self.step(),
                None,
                "ended with {:?}",
                String::from_utf8_lossy(&self.stdout)
            );
        }
    }

    /// The code and reason of the server's close frame.
    fn closed(mut self) -> (u16, String) {
        loop {
            if let Message::Close(Some(frame)) = self.socket.read().unwrap() {
                return (frame.code.into(), frame.reason.to_string());
            }
        }
    }
}

fn argv(words: &[&str]) -> Start {
    Start {
        argv: Some(words.iter().map(|word| (*word).to_owned()).collect()),
        ..Start::default()
    }
}

fn shell(line: &str) -> Start {
    Start {
        command: Some(line.to_owned()),
        ..Start::default()
    }
}

#[test]
fn stdin_stdout_and_stderr_have_separate_channels() {
    let sandbox = Sandbox::start();
    let mut connection = Connection::start(
        &sandbox,
        shell("read line; echo got $line; echo bad >&2; cat; exit 3"),
    );
    connection.type_in(b"hello\nrest");
    connection.send(&ClientMessage::StdinClose);
    assert_eq!(
        connection.until_exit(),
        Exit {
            exit_code: 3,
            ..Exit::default()
        }
    );
    assert_eq!(connection.stdout, b"got hello\nrest");
    assert_eq!(connection.stderr, b"bad\n");
    assert_eq!(connection.closed().0, 1000);
}

#[test]
fn arguments_environment_and_directory_are_honoured() {
    let sandbox = Sandbox::start();
    std::fs::create_dir(sandbox.base().join("work")).unwrap();
    let start = Start {
        cwd: Some("work".into()),
        env: [("COLOUR".to_owned(), "blue green".to_owned())].into(),
        ..argv(&[
            "python3",
            "-c",
            "import os,sys; print(os.getcwd(), os.environ['COLOUR'], sys.argv[1])",
            "$x;",
        ])
    };
    let mut connection = Connection::start(&sandbox, start);
    assert_eq!(connection.until_exit().exit_code, 0);
    let expected = format!("{}/work blue green $x;\n", sandbox.base().display());
    assert_eq!(String::from_utf8_lossy(&connection.stdout), expected);
}

#[test]
fn a_terminal_echoes_resizes_and_interrupts() {
    let sandbox = Sandbox::start();
    let start = Start {
        tty: true,
        rows: Some(30),
        cols: Some(100),
        ..argv(&["/bin/sh"])
    };
    let mut connection = Connection::start(&sandbox, start);
    connection.type_in(b"stty size; tty\n");
    connection.until_output("30 100");
    connection.until_output("/dev/pts/");
    connection.send(&ClientMessage::Resize {
        rows: 50,
        cols: 120,
    });
    connection.type_in(b"stty size\n");
    connection.until_output("50 120");
    connection.type_in(b"sh -c 'echo begun; exec sleep 300'\n");
    connection.until_output("begun\r\n");
    connection.type_in(b"\x03");
    connection.type_in(b"echo code $?; exit 9\n");
    connection.until_output("code 130");
    assert_eq!(connection.until_exit().exit_code, 9);
}

#[test]
fn a_terminal_loses_no_output() {
    let sandbox = Sandbox::start();
    let line = "python3 -c \"import sys\nfor i in range(200000): sys.stdout.write('%06d.........\\n' % i)\"";
    let mut connection = Connection::start(
        &sandbox,
        Start {
            tty: true,
            ..shell(line)
        },
    );
    assert_eq!(connection.until_exit().exit_code, 0);
    let text = String::from_utf8_lossy(&connection.stdout).into_owned();
    let numbers = text.lines().map(|line| line[..6].parse::<usize>().unwrap());
    assert!(numbers.eq(0..200_000));
}

#[test]
fn the_end_of_file_character_ends_a_terminals_input() {
    let sandbox = Sandbox::start();
    let mut connection = Connection::start(
        &sandbox,
        Start {
            tty: true,
            ..argv(&["cat"])
        },
    );
    connection.type_in(b"line\n");
    connection.until_output("line\r\nline\r\n");
    connection.send(&ClientMessage::StdinClose);
    assert_eq!(connection.until_exit().exit_code, 0);
}

#[test]
fn signals_reach_the_process_group() {
    let sandbox = Sandbox::start();
    let mut connection = Connection::start(
        &sandbox,
        shell("trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep 0.05; done"),
    );
    connection.until_output("ready");
    connection.send(&ClientMessage::Signal {
        signal: SignalName::Name("USR1".into()),
    });
    assert_eq!(connection.until_exit().exit_code, 5);
    assert!(String::from_utf8_lossy(&connection.stdout).contains("caught"));

    let mut killed = Connection::start(&sandbox, argv(&["sleep", "300"]));
    killed.step();
    killed.send(&ClientMessage::Signal {
        signal: SignalName::Number(9),
    });
    assert_eq!(
        killed.until_exit(),
        Exit {
            exit_code: 137,
            signal: Some("SIGKILL".into()),
            ..Exit::default()
        }
    );
}

#[test]
fn a_command_that_cannot_start_has_the_exit_code_of_a_shell() {
    let sandbox = Sandbox::start();
    let missing = Connection::start(&sandbox, argv(&["no-such-program"])).until_exit();
    assert_eq!(missing.exit_code, 127);
    assert!(missing.error.unwrap().contains("no-such-program"));
    std::fs::write(sandbox.base().join("plain"), "not a program").unwrap();
    let refused = Connection::start(&sandbox, argv(&["./plain"])).until_exit();
    assert_eq!(refused.exit_code, 126);
    let mut on_terminal = Connection::start(
        &sandbox,
        Start {
            tty: true,
            ..argv(&["no-such-program"])
        },
    );
    assert_eq!(on_terminal.until_exit().exit_code, 127);
    assert!(String::from_utf8_lossy(&on_terminal.stdout).contains("no-such-program"));
    let ambiguous = Connection::start(&sandbox, Start::default()).until_exit();
    assert_eq!(ambiguous.exit_code, 126);
}

#[test]
fn a_time_limit_ends_an_interactive_command() {
    let sandbox = Sandbox::start();
    let start = Start {
        timeout_seconds: Some(0.2),
        ..argv(&["sleep", "300"])
    };
    let exit = Connection::start(&sandbox, start).until_exit();
    assert_eq!((exit.exit_code, exit.timed_out), (124, true));
}

#[test]
fn a_client_that_disconnects_kills_the_interactive_command() {
    let sandbox = Sandbox::start();
    for tty in [false, true] {
        let mut connection = Connection::start(
            &sandbox,
            Start {
                tty,
                ..shell("echo pid $$ end; sleep 300 & wait")
            },
        );
        connection.until_output("end");
        let text = String::from_utf8_lossy(&connection.stdout).into_owned();
        let pid = text.split_whitespace().nth(1).unwrap().to_owned();
        drop(connection);
        support::wait_until_gone(&pid);
    }
}

#[test]
fn invalid_frames_close_the_connection_with_the_reason() {
    let sandbox = Sandbox::start();
    let mut no_json = Connection::open(&sandbox);
    no_json.socket.send(Message::text("not json")).unwrap();
    assert_eq!(no_json.closed().0, 1008);
    let mut early = Connection::open(&sandbox);
    early.send(&ClientMessage::StdinClose);
    assert!(early.closed().1.contains("start"));
    let mut wrong_channel = Connection::start(&sandbox, argv(&["sleep", "300"]));
    wrong_channel.step();
    wrong_channel
        .socket
        .send(Message::Binary(vec![9, 1].into()))
        .unwrap();
    assert_eq!(wrong_channel.closed().0, 1008);
    assert_eq!(status_of(&sandbox.get("/v1/exec")), 426);
}

#[test]
fn output_waits_for_a_slow_client_and_arrives_complete() {
    let sandbox = Sandbox::start();
    let mut connection =
        Connection::start(&sandbox, argv(&["head", "-c", "20000000", "/dev/zero"]));
    connection.step();
    let written = std::cell::Cell::new(0);
    support::wait_for("the command to block on its output", || {
        let before = written.replace(connection.written());
        before > 0 && before == written.get()
    });
    let rss = resident_kib(sandbox.pid());
    assert!(
        rss < 64 * 1024,
        "{rss} KiB are buffered for a client that does not read"
    );
    assert_eq!(connection.until_exit().exit_code, 0);
    assert_eq!(connection.stdout.len(), 20_000_000);
}

#[test]
fn a_client_that_pauses_after_the_command_ended_loses_no_output() {
    let sandbox = Sandbox::start();
    let mut connection =
        Connection::start(&sandbox, argv(&["head", "-c", "10000000", "/dev/zero"]));
    connection.step();
    let counters = format!("/proc/{}/io", connection.pid);
    // Reads a chunk only while the command blocks, so that when it ends the pipe and all buffers are full.
    loop {
        let written = std::cell::RefCell::new(Some(String::new()));
        support::wait_for("the command to block or to end", || {
            let before = written.replace(std::fs::read_to_string(&counters).ok());
            before == *written.borrow() || written.borrow().is_none()
        });
        if written.borrow().is_none() {
            break;
        }
        assert_eq!(connection.step(), None, "the exit comes last");
    }
    // Longer than a background process may delay the exit. The length of the pause is what is tested.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(connection.until_exit().exit_code, 0);
    assert_eq!(connection.stdout.len(), 10_000_000);
}

#[test]
fn a_background_process_does_not_delay_the_exit() {
    let sandbox = Sandbox::start();
    for line in ["sleep 300 & exit 3", "yes & exit 3"] {
        let mut connection = Connection::start(&sandbox, shell(line));
        assert_eq!(connection.until_exit().exit_code, 3, "{line}");
    }
}

fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn chunks_joined(body: &[u8]) -> Vec<u8> {
    let mut joined = Vec::new();
    let mut rest = body;
    loop {
        let end = rest
            .windows(2)
            .position(|window| window == b"\r\n")
            .unwrap();
        let length = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        if length == 0 {
            return joined;
        }
        joined.extend_from_slice(&rest[end + 2..end + 2 + length]);
        rest = &rest[end + 2 + length + 2..];
    }
}

fn stream(sandbox: &Sandbox, start: &Value) -> Vec<Value> {
    let body = start.to_string();
    let answer = sandbox.request(&format!(
        "POST /v1/exec HTTP/1.1\r\nHost: x\r\nAccept: application/x-ndjson\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    assert_eq!(status_of(&answer), 200);
    let has_length = String::from_utf8_lossy(&answer[..200.min(answer.len())])
        .to_lowercase()
        .contains("content-length");
    let body = if has_length {
        body_of(&answer).to_vec()
    } else {
        chunks_joined(body_of(&answer))
    };
    String::from_utf8(body)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn a_stream_of_lines_contains_output_and_exit() {
    let sandbox = Sandbox::start();
    let events = stream(
        &sandbox,
        &json!({"command": "cat; echo bad >&2; exit 4", "stdin": "täxt"}),
    );
    assert_eq!(events.first().unwrap()["type"], "started");
    assert_eq!(
        events.last().unwrap(),
        &json!({"type": "exit", "exit_code": 4})
    );
    assert!(events.contains(&json!({"type": "stdout", "data": "täxt"})));
    assert!(events.contains(&json!({"type": "stderr", "data": "bad\n"})));
    let missing = stream(&sandbox, &json!({"argv": ["no-such-program"]}));
    assert_eq!(missing.len(), 1);
    assert_eq!(missing[0]["exit_code"], 127);
}

#[test]
fn without_a_stream_the_response_is_one_object() {
    let sandbox = Sandbox::start();
    let answer = sandbox.post_json(
        "/v1/exec",
        r#"{"argv": ["sh", "-c", "echo out; kill -15 $$"]}"#,
    );
    let body: Value = serde_json::from_slice(body_of(&answer)).unwrap();
    assert_eq!(
        body,
        json!({"stdout": "out\n", "stderr": "", "exit_code": 143, "signal": "SIGTERM"})
    );
    assert_eq!(
        status_of(&sandbox.post_json("/v1/exec", r#"{"argv": ["a"], "command": "b"}"#)),
        400
    );
    assert_eq!(
        status_of(&sandbox.post_json("/v1/exec", r#"{"argv": ["a"], "tty": true}"#)),
        400
    );
}

#[test]
fn orphans_are_reaped() {
    let sandbox = Sandbox::start();
    let answer = sandbox.execute(&json!({"command": "sh -c '(sleep 0.05 & echo $!)'"}));
    let orphan = answer["stdout"].as_str().unwrap().trim().to_owned();
    support::wait_for("the orphan to be collected", || {
        !support::exists(format!("/proc/{orphan}").as_ref())
    });
}

#[test]
fn termination_reaches_running_commands_and_then_the_server_ends() {
    let sandbox = Sandbox::start();
    let mut connection = Connection::start(
        &sandbox,
        shell("trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done"),
    );
    connection.until_output("ready");
    let terminating = std::thread::spawn(move || sandbox.terminate());
    assert_eq!(connection.until_exit().exit_code, 0);
    assert!(String::from_utf8_lossy(&connection.stdout).contains("bye"));
    drop(connection);
    assert_eq!(terminating.join().unwrap(), Some(0));
}

#[test]
fn a_command_that_ignores_termination_is_killed_after_the_grace_period() {
    let sandbox = Sandbox::start_with(|options| options.shutdown_grace_seconds = 1);
    let mut connection = Connection::start(
        &sandbox,
        shell("trap '' TERM; echo ready; while :; do sleep 0.05; done"),
    );
    connection.until_output("ready");
    let terminating = std::thread::spawn(move || sandbox.terminate());
    assert_eq!(connection.until_exit().signal.as_deref(), Some("SIGKILL"));
    drop(connection);
    assert_eq!(terminating.join().unwrap(), Some(0));
}
