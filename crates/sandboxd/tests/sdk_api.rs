//! The SDK API from the client's side: raw HTTP against a running server.

mod support;

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Sandbox, body_of, multipart, status_of};

#[test]
fn health_answers_ok() {
    let sandbox = Sandbox::start();
    let answer = sandbox.request("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    assert_eq!(status_of(&answer), 200);
    let body: Value = serde_json::from_slice(body_of(&answer)).unwrap();
    assert_eq!(body["status"], "ok");
    assert!(body["message"].is_string());
}

#[test]
fn a_command_is_split_into_words_and_run_in_the_base_directory() {
    let sandbox = Sandbox::start();
    let answer = sandbox.execute(&json!({"command": "python3 -c 'import os,sys; print(os.getcwd(), sys.argv[1:])' 'a b' $HOME"}));
    assert_eq!(
        answer["stdout"],
        format!("{} ['a b', '$HOME']\n", sandbox.base().display())
    );
    assert_eq!(answer["exit_code"], 0);
    assert_eq!(answer["stderr"], "");
    assert_eq!(answer["timed_out"], false);
    let failing = sandbox.execute(&json!({"command": "sh -c 'echo out; echo err >&2; exit 7'"}));
    assert_eq!(
        failing,
        json!({"stdout": "out\n", "stderr": "err\n", "exit_code": 7, "timed_out": false})
    );
}

#[test]
fn cross_site_pages_cannot_run_commands() {
    let sandbox = Sandbox::start();
    let touch = r#"{"command": "touch ran"}"#;
    let from = |site: &str, request: String| {
        request.replacen("Host: x", &format!("Host: x\r\nSec-Fetch-Site: {site}"), 1)
    };
    let websocket = "GET /v1/exec HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\
                     Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-Fetch-Mode: websocket\r\n\r\n";
    for site in ["cross-site", "same-site"] {
        for request in [support::post("/execute", touch), websocket.to_owned()] {
            let answer = sandbox.request(&from(site, request));
            assert_eq!(status_of(&answer), 403, "{site}");
        }
    }
    let without_tls = support::post("/execute", touch);
    let without_tls = without_tls.replacen("Host: x", "Host: x\r\nOrigin: http://y", 1);
    assert_eq!(status_of(&sandbox.request(&without_tls)), 403);
    assert!(!sandbox.base().join("ran").exists());
    // Pages of the same origin may, and so may a user who follows a link to a file.
    let answer = sandbox.request(&from("same-origin", support::post("/execute", touch)));
    assert_eq!(status_of(&answer), 200);
    let link = "GET /download/ran HTTP/1.1\r\nHost: x\r\nConnection: close\r\nSec-Fetch-Mode: navigate\r\n\r\n";
    let answer = sandbox.request(&from("cross-site", link.to_owned()));
    assert_eq!(status_of(&answer), 200);
}

#[test]
fn a_command_that_cannot_start_is_a_response_with_the_reason() {
    let sandbox = Sandbox::start();
    for (command, reason) in [
        (
            "no-such-program x",
            "No such file or directory: 'no-such-program'",
        ),
        ("echo 'open", "No closing quotation"),
        ("", "empty"),
    ] {
        let answer = sandbox.execute(&json!({"command": command}));
        assert_eq!(answer["exit_code"], 1, "{command}");
        assert_eq!(answer["stdout"], "");
        let stderr = answer["stderr"].as_str().unwrap();
        assert!(
            stderr.starts_with("Failed to execute command: ") && stderr.contains(reason),
            "{stderr}"
        );
    }
}

#[test]
fn a_signal_is_reported_as_its_negative_number() {
    let answer = Sandbox::start().execute(&json!({"command": "sh -c 'kill -9 $$'"}));
    assert_eq!(answer["exit_code"], -9);
}

#[test]
fn a_timeout_kills_the_whole_process_group() {
    let sandbox = Sandbox::start();
    let marker = sandbox.base().join("pid");
    let command = format!(
        "sh -c 'sleep 300 & echo $! > {}; echo before; wait'",
        marker.display()
    );
    // On a busy machine the command may not have begun at its time limit; then it gets more time.
    let mut limits = [0.3, 5.0, 60.0].into_iter();
    let began = limits.any(|limit| {
        let started = Instant::now();
        let answer = sandbox.execute(&json!({"command": command, "timeout_seconds": limit}));
        assert!(started.elapsed() < Duration::from_secs(200));
        assert_eq!(answer["exit_code"], 124);
        assert_eq!(answer["timed_out"], true);
        answer["stdout"] == "before\n"
    });
    assert!(began, "the response contains the output before the kill");
    support::wait_until_gone(&std::fs::read_to_string(marker).unwrap());
}

#[test]
fn the_environment_sets_the_default_time_limit() {
    let sandbox = Sandbox::start_with(|options| {
        options.environment = vec![("SANDBOX_EXEC_TIMEOUT_SECONDS", "0.3")];
    });
    let answer = sandbox.execute(&json!({"command": "sleep 300"}));
    assert_eq!(answer["exit_code"], 124);
    assert_eq!(answer["timed_out"], true);
    let allowed = sandbox.execute(&json!({"command": "sleep 0.6", "timeout_seconds": 60}));
    assert_eq!(allowed["exit_code"], 0, "a request may ask for more");
}

#[test]
fn a_client_that_disconnects_kills_its_command() {
    let sandbox = Sandbox::start();
    let marker = sandbox.base().join("pid");
    let command = format!("sh -c 'echo $$ > {}; exec sleep 300'", marker.display());
    let body = json!({ "command": command }).to_string();
    let stream = sandbox.send(&format!(
        "POST /execute HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    support::wait_for("the command to start", || {
        marker.exists() && !std::fs::read_to_string(&marker).unwrap().is_empty()
    });
    drop(stream);
    support::wait_until_gone(&std::fs::read_to_string(marker).unwrap());
}

#[test]
fn output_beyond_the_limit_is_dropped_and_flagged() {
    let sandbox = Sandbox::start_with(|config| config.max_output_bytes = 1000);
    let answer = sandbox.execute(&json!({"command": "python3 -c \"print('x' * 5000000)\""}));
    assert_eq!(answer["stdout"].as_str().unwrap().len(), 1000);
    assert_eq!(answer["truncated"], true);
    assert_eq!(
        answer["stderr"], "Output truncated: only the first 1000 bytes of each stream were kept",
        "a client that does not know `truncated` sees it"
    );
    assert_eq!(answer["exit_code"], 0);
}

#[test]
fn a_background_process_does_not_delay_the_response() {
    let sandbox = Sandbox::start();
    let started = Instant::now();
    let answer = sandbox.execute(&json!({"command": "sh -c 'sleep 300 & echo $!'"}));
    assert!(started.elapsed() < Duration::from_secs(120));
    assert_eq!(answer["exit_code"], 0);
    let background = answer["stdout"].as_str().unwrap().trim().to_owned();
    assert!(
        std::path::Path::new(&format!("/proc/{background}")).exists(),
        "the process keeps running"
    );
    std::process::Command::new("kill")
        .args(["-9", &background])
        .status()
        .unwrap();
}

#[test]
fn invalid_requests_are_refused() {
    let sandbox = Sandbox::start();
    for body in [
        "{}",
        "not json",
        r#"{"command": 5}"#,
        r#"{"command": "true", "timeout_seconds": -1}"#,
    ] {
        let answer = sandbox.post_json("/execute", body);
        assert_eq!(status_of(&answer), 422, "{body}");
        let message: Value = serde_json::from_slice(body_of(&answer)).unwrap();
        assert!(message["message"].is_string());
    }
    assert_eq!(status_of(&sandbox.get("/nothing")), 404);
    assert_eq!(status_of(&sandbox.get("/execute")), 405);
    assert_eq!(
        status_of(&sandbox.post_json("/agent", r#"{"query": "x"}"#)),
        404
    );
}

#[test]
fn an_oversized_request_is_refused() {
    let sandbox = Sandbox::start();
    let body = json!({"command": "x".repeat(9 * 1024 * 1024)}).to_string();
    let answer = sandbox.post_json("/execute", &body);
    assert_eq!(status_of(&answer), 413);
}

#[test]
fn uploads_arrive_complete_and_create_their_directories() {
    let sandbox = Sandbox::start();
    for name in [
        "plain.txt",
        "deep/er/file.bin",
        "ünïcode.txt",
        "with space.txt",
    ] {
        let content: Vec<u8> = (0..=255).cycle().take(300_000).collect();
        let answer = sandbox.request_bytes(&multipart(name, &content));
        assert_eq!(status_of(&answer), 200, "{name}");
        let body: Value = serde_json::from_slice(body_of(&answer)).unwrap();
        assert!(body["message"].as_str().unwrap().contains(name));
        assert_eq!(
            std::fs::read(sandbox.base().join(name)).unwrap(),
            content,
            "{name}"
        );
    }
    let names: Vec<_> = std::fs::read_dir(sandbox.base())
        .unwrap()
        .map(|found| found.unwrap().file_name())
        .collect();
    assert!(
        !names
            .iter()
            .any(|name| name.to_string_lossy().contains("partial")),
        "{names:?}"
    );
}

#[test]
fn an_upload_that_escapes_is_forbidden_and_writes_nothing() {
    let sandbox = Sandbox::start();
    std::os::unix::fs::symlink("/", sandbox.base().join("root")).unwrap();
    for name in ["../escaped", "a/../../escaped", "root/tmp/escaped-by-link"] {
        let answer = sandbox.request_bytes(&multipart(name, b"x"));
        assert_eq!(status_of(&answer), 403, "{name}");
        let body: Value = serde_json::from_slice(body_of(&answer)).unwrap();
        assert!(body["message"].is_string(), "{name}");
    }
    assert!(!sandbox.base().parent().unwrap().join("escaped").exists());
    assert!(!std::path::Path::new("/tmp/escaped-by-link").exists());
}

#[test]
fn a_truncated_upload_leaves_no_file() {
    let sandbox = Sandbox::start();
    let whole = multipart("cut.bin", &vec![7; 500_000]);
    let stream = sandbox.send_bytes(&whole[..whole.len() / 2]);
    support::wait_for("the upload to begin", || {
        std::fs::read_dir(sandbox.base()).unwrap().count() == 1
    });
    drop(stream);
    support::wait_for("the partial file to go", || {
        std::fs::read_dir(sandbox.base()).unwrap().count() == 0
    });
}

#[test]
fn downloads_stream_the_bytes() {
    let sandbox = Sandbox::start();
    let content: Vec<u8> = (0..=255).cycle().take(1_000_003).collect();
    std::fs::create_dir(sandbox.base().join("sub")).unwrap();
    std::fs::write(sandbox.base().join("sub/file.bin"), &content).unwrap();
    let answer = sandbox.get("/download/sub%2Ffile.bin");
    assert_eq!(status_of(&answer), 200);
    assert!(
        String::from_utf8_lossy(&answer[..300])
            .to_ascii_lowercase()
            .contains("application/octet-stream")
    );
    assert_eq!(body_of(&answer), content);
    assert_eq!(body_of(&sandbox.get("/download/sub/file.bin")), content);
    for (path, status) in [
        ("missing", 404),
        ("sub", 404),
        ("..%2F..%2Fetc%2Fpasswd", 403),
        ("a%00b", 400),
    ] {
        let answer = sandbox.get(&format!("/download/{path}"));
        assert_eq!(status_of(&answer), status, "{path}");
        let body: Value = serde_json::from_slice(body_of(&answer)).unwrap();
        assert!(body["message"].is_string(), "{path}");
    }
}

#[test]
fn listings_and_existence_have_the_documented_format() {
    let sandbox = Sandbox::start();
    std::fs::create_dir(sandbox.base().join("sub")).unwrap();
    std::fs::write(sandbox.base().join("sub/file"), "12345").unwrap();
    std::fs::create_dir(sandbox.base().join("sub/inner")).unwrap();
    let listing: Value = serde_json::from_slice(body_of(&sandbox.get("/list/sub"))).unwrap();
    let entries = listing.as_array().unwrap();
    assert_eq!(entries.len(), 2);
    assert_eq!(
        (
            &entries[0]["name"],
            &entries[0]["size"],
            &entries[0]["type"]
        ),
        (&json!("file"), &json!(5), &json!("file"))
    );
    assert_eq!(
        (&entries[1]["name"], &entries[1]["type"]),
        (&json!("inner"), &json!("directory"))
    );
    assert!(entries[0]["mod_time"].as_f64().unwrap() > 1.7e9);
    assert_eq!(status_of(&sandbox.get("/list/sub%2Ffile")), 404);
    assert_eq!(status_of(&sandbox.get("/list/missing")), 404);
    assert_eq!(status_of(&sandbox.get("/list/..")), 403);
    assert_eq!(status_of(&sandbox.get("/list/.")), 200);
    assert_eq!(
        body_of(&sandbox.get("/list")),
        body_of(&sandbox.get("/list/."))
    );
    let exists =
        |path: &str| -> Value { serde_json::from_slice(body_of(&sandbox.get(path))).unwrap() };
    assert_eq!(
        exists("/exists/sub%2Ffile"),
        json!({"path": "sub/file", "exists": true})
    );
    assert_eq!(
        exists("/exists/sub%2Fnone"),
        json!({"path": "sub/none", "exists": false})
    );
    assert_eq!(status_of(&sandbox.get("/exists/..%2Fx")), 403);
}

#[test]
fn directories_are_created_with_their_parents() {
    let sandbox = Sandbox::start();
    let make = |path: &str| status_of(&sandbox.post_json(&format!("/mkdir/{path}"), ""));
    assert_eq!(make("a%2Fb%2Fc"), 200);
    assert!(sandbox.base().join("a/b/c").is_dir());
    assert_eq!(make("a%2Fb%2Fc"), 200, "the directory exists already");
    std::fs::write(sandbox.base().join("file"), "kept").unwrap();
    assert_eq!(make("file"), 409);
    assert_eq!(make("file%2Fbelow"), 409);
    assert_eq!(make("..%2Foutside"), 403);
    assert_eq!(status_of(&sandbox.get("/mkdir/a")), 405);
    let content = std::fs::read_to_string(sandbox.base().join("file")).unwrap();
    assert_eq!(content, "kept");
}

#[test]
fn variables_from_init_reach_later_commands() {
    let sandbox = Sandbox::start();
    let init = |body: &str| status_of(&sandbox.init_request("POST", "/init", body));
    assert_eq!(status_of(&sandbox.init_request("GET", "/health", "")), 204);
    assert_eq!(
        init(r#"{"envVars": {"GREETING": "hello"}, "accessToken": "t1"}"#),
        204
    );
    assert_eq!(
        init(r#"{"envVars": {"GREETING": "hello"}, "accessToken": "t1"}"#),
        204
    );
    assert_eq!(
        init(r#"{"envVars": {"GREETING": "other"}, "accessToken": "t2"}"#),
        401
    );
    let answer = sandbox.execute(&json!({"command": "sh -c 'echo $GREETING'"}));
    assert_eq!(answer["stdout"], "hello\n");
}

#[test]
fn hostile_heads_get_a_clear_error() {
    let sandbox = Sandbox::start();
    for head in [
        "POST /execute HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
        "POST /execute HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        "POST /execute HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        "GET / HTTP/1.1\r\nBad Header: x\r\n\r\n",
        "nonsense\r\n\r\n",
    ] {
        let answer = String::from_utf8_lossy(&sandbox.request(head)).into_owned();
        assert!(!answer.contains("200 OK"), "{head:?} got {answer:?}");
        assert!(
            answer.matches("HTTP/1.1").count() <= 1,
            "{head:?} got {answer:?}"
        );
    }
    assert_eq!(status_of(&sandbox.get("/")), 200, "the server still works");
}

#[test]
fn large_files_are_streamed_in_bounded_memory() {
    use std::io::{Read, Write};
    const SIZE: usize = 256 * 1024 * 1024;
    let sandbox = Sandbox::start();
    let framing = multipart("large.bin", b"");
    let text = String::from_utf8(framing).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let (before, after) = body.split_once("\r\n\r\n").unwrap();
    let length = before.len() + 4 + SIZE + after.len();
    let head = head.replace(
        &format!("Content-Length: {}", body.len()),
        &format!("Content-Length: {length}"),
    );
    let mut upload = sandbox.send(&format!("{head}\r\n\r\n{before}\r\n\r\n"));
    let piece = vec![b'x'; 1024 * 1024];
    for _ in 0..SIZE / piece.len() {
        upload.write_all(&piece).unwrap();
    }
    upload.write_all(after.as_bytes()).unwrap();
    assert_eq!(status_of(&support::read_all(upload)), 200);
    assert_eq!(
        std::fs::metadata(sandbox.base().join("large.bin"))
            .unwrap()
            .len(),
        SIZE as u64
    );
    let mut download =
        sandbox.send("GET /download/large.bin HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let mut buffer = vec![0; 1024 * 1024];
    let mut total = 0;
    loop {
        match download.read(&mut buffer).unwrap() {
            0 => break,
            count => total += count,
        }
    }
    assert!(total > SIZE, "{total}");
    let status = std::fs::read_to_string(format!("/proc/{}/status", sandbox.pid())).unwrap();
    let peak = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    let peak_kib: u64 = peak.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(peak_kib < 48 * 1024, "{peak_kib} KiB at the peak");
}

#[test]
fn a_range_of_a_download_is_served_alone() {
    let sandbox = Sandbox::start();
    std::fs::write(sandbox.base().join("f"), "0123456789").unwrap();
    let ask = |method: &str, range: &str| {
        let request = format!(
            "{method} /download/f HTTP/1.1\r\nHost: x\r\nConnection: close\r\nRange: {range}\r\n\r\n"
        );
        support::read_all(sandbox.send(&request))
    };
    let part = ask("GET", "bytes=-3");
    assert_eq!((status_of(&part), body_of(&part)), (206, &b"789"[..]));
    assert_eq!(status_of(&ask("GET", "bytes=10-")), 416);
    assert_eq!(status_of(&ask("HEAD", "bytes=-3")), 200);
}

#[test]
fn files_are_deleted_inspected_and_renamed_by_the_newer_names() {
    let sandbox = Sandbox::start();
    std::fs::create_dir(sandbox.base().join("d")).unwrap();
    std::fs::write(sandbox.base().join("d/f"), "x").unwrap();
    let ask = |method: &str, path: &str| {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        );
        status_of(&support::read_all(sandbox.send(&request)))
    };
    assert_eq!(ask("GET", "/v1/files/d%2Ff?stat=true"), 200);
    assert_eq!(ask("POST", "/v1/files/d%2Ff?rename_to=d%2Fg"), 204);
    assert!(sandbox.base().join("d/g").exists());
    assert_eq!(ask("DELETE", "/v1/files/d"), 409);
    assert_eq!(ask("DELETE", "/v1/files/d?recursive=true"), 204);
    assert!(!sandbox.base().join("d").exists());
    assert_eq!(ask("DELETE", "/v1/files/d"), 404);
}
