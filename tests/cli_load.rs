//! `corelane load` against this tool's servers, a foreign one, and servers that misbehave.
#![cfg(all(feature = "cli", target_os = "linux"))]

mod cli_support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use cli_support::{Ended, Process, Server, corelane, python, run};
use serde_json::Value;

/// Runs the load with a short ramp and window, and reads its result.
fn load(addr: SocketAddr, args: &[&str]) -> (Ended, Value) {
    let ended = run(&command(addr, args).iter().map(String::as_str).collect::<Vec<_>>());
    let result = result(&ended);
    (ended, result)
}

fn command(addr: SocketAddr, args: &[&str]) -> Vec<String> {
    let mut all = vec!["load".to_owned()];
    all.extend(args.iter().map(|&arg| arg.to_owned()));
    all.extend(["--target", &addr.to_string(), "--json", "-"].map(str::to_owned));
    for (flag, value) in [("-d", "500ms"), ("--warmup", "100ms")] {
        if !args.contains(&flag) {
            all.extend([flag, value].map(str::to_owned));
        }
    }
    all
}

fn result(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"))
}

/// The run went well; or so it did but for a test machine too busy for the generator to keep its
/// schedule, which the tool must then say (and no test can prevent).
#[track_caller]
fn went_well(ended: &Ended) {
    match ended.code {
        Some(0) => {}
        Some(5) if format!("{}{}", ended.stdout, ended.stderr).contains("the generator is saturated") => {
            eprintln!("busy machine: {ended:?}");
        }
        _ => panic!("{ended:?}"),
    }
}

/// A server that handles each connection with `serve`, on a thread of its own.
fn server(serve: impl Fn(TcpStream) + Send + Sync + Clone + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("address");
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let serve = serve.clone();
            thread::spawn(move || serve(stream));
        }
    });
    addr
}

#[test]
fn echo_in_a_closed_loop() {
    let server = Server::start(&["echo"]);
    let (ended, result) =
        load(server.addr, &["echo", "-c", "20", "--size", "300", "--pipeline", "3", "--workers", "2"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(result["ramp"]["connected"], 20);
    assert_eq!(result["errors"]["server_total"], 0, "{ended:?}");
    let window = &result["window"];
    assert!(window["replied"].as_u64() > Some(100), "{window}");
    assert_eq!(window["replied"], window["planned"]);
    assert_eq!(window["response_us"]["count"], window["replied"]);
    assert!(ended.stderr.contains("result      valid"), "{ended:?}");
    // Everything the generator sent was seen by the server, and nothing was left behind.
    let ended = server.stop();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("20 accepted"), "{ended:?}");
}

#[test]
fn large_messages_come_back_whole() {
    let server = Server::start(&["echo", "--buffers", "4KiBx64"]);
    let (ended, result) = load(server.addr, &["echo", "-c", "4", "--size", "300KiB", "--pipeline", "2"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(result["errors"]["server_total"], 0, "{ended:?}");
    assert!(result["window"]["replied"].as_u64() > Some(10), "{ended:?}");
}

#[test]
fn echo_at_a_rate_keeps_the_rate() {
    let server = Server::start(&["echo"]);
    let (ended, result) = load(server.addr, &["echo", "-c", "10", "--rate", "2k/s", "-d", "1s"]);
    went_well(&ended);
    assert_eq!(result["config"]["loop_kind"], "open");
    let planned = result["window"]["planned"].as_u64().expect("a number");
    assert!((1999..=2001).contains(&planned), "{planned}");
    assert_eq!(result["window"]["replied"], planned);
    assert_eq!(result["window"]["service_us"]["count"], planned);
    assert_eq!(result["generator"]["lag_us"]["count"], planned);
}

#[test]
fn heartbeats_spread_and_aligned() {
    let server = Server::start(&["heartbeat"]);
    for phase in ["spread", "aligned"] {
        let args = ["heartbeat", "-c", "300", "--interval", "250ms", "--phase", phase, "-d", "1s"];
        let (ended, result) = load(server.addr, &args);
        went_well(&ended);
        assert_eq!(result["window"]["planned"], 1200, "{phase}: {ended:?}");
        assert_eq!(result["window"]["replied"], 1200, "{phase}: {ended:?}");
        assert_eq!(result["config"]["phase"], phase);
    }
}

#[test]
fn many_targets_and_sources() {
    let server = Server::start(&["heartbeat", "--listen", "0.0.0.0:0"]);
    let target = format!("127.0.0.1-3:{}", server.addr.port());
    let ended = run(&[
        "load",
        "heartbeat",
        "--target",
        &target,
        "--source",
        "127.0.0.4-6",
        "-c",
        "90",
        "--interval",
        "100ms",
        "-d",
        "300ms",
        "--warmup",
        "0s",
        "--fail-if",
        "errors>0",
        "--fail-if",
        "connected<90",
        "--quiet",
    ]);
    went_well(&ended);
    assert!(ended.stdout.contains("and 2 more"), "{ended:?}");
}

#[test]
fn thresholds_decide_the_exit_code() {
    let server = Server::start(&["echo"]);
    let (ended, result) =
        load(server.addr, &["echo", "-c", "2", "--fail-if", "p50>1ns", "--fail-if", "errors>0"]);
    assert_eq!(ended.code, Some(3), "{ended:?}");
    assert_eq!(result["thresholds"][0]["failed"], true);
    assert_eq!(result["thresholds"][1]["failed"], false);
    assert_eq!(result["verdict"]["exit_code"], 3);
    assert!(ended.stderr.contains("THRESHOLD MISSED"), "{ended:?}");
    let (ended, _) = load(server.addr, &["echo", "-c", "2", "--fail-if", "p99>1h"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

#[test]
fn no_server_is_a_failure_that_says_so() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("address");
    let (ended, result) = load(free, &["echo", "-c", "8"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(result["errors"]["server"]["connect_refused"], 8);
    assert!(
        ended.stderr.contains("8 × connect_refused") && ended.stderr.contains("is the server running"),
        "{ended:?}"
    );
}

#[test]
fn wrong_replies_are_noticed() {
    // Swaps two bytes of everything.
    let addr = server(|mut stream| {
        let mut piece = [0; 64];
        while stream.read_exact(&mut piece).is_ok() {
            piece.swap(10, 11);
            if stream.write_all(&piece).is_err() {
                return;
            }
        }
    });
    let (ended, result) = load(addr, &["echo", "-c", "3", "--warmup", "0s"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("FAILED: none of the 3 messages of the window was answered"), "{ended:?}");
    assert_eq!(result["verdict"]["failed"], true);
    assert_eq!(result["window"]["lost"], 3, "{ended:?}");
    assert_eq!(result["errors"]["server"]["reply_mismatch"], 3, "{ended:?}");
    let first = result["errors"]["first_mismatch"].as_str().expect("said");
    assert!(first.contains("byte 0") && first.contains("expected"), "{first}");
    // A failed run is that above all.
    let (ended, result) = load(addr, &["echo", "-c", "3", "--warmup", "0s", "--fail-if", "mismatches>0"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(result["verdict"]["passed"], false);
    // All connections end in the warm-up, long before it is over: there is nothing to report.
    let (ended, _) = load(addr, &["echo", "-c", "3", "--warmup", "60s", "-d", "60s"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("no message was sent in the window"), "{ended:?}");
    assert!(ended.stderr.contains("stopped early"), "{ended:?}");
}

#[test]
fn a_run_whose_connections_all_end_is_over_and_has_failed() {
    // Answers ten times, then closes.
    let addr = server(|mut stream| {
        let mut piece = [0; 64];
        for _ in 0..10 {
            if stream.read_exact(&mut piece).is_err() || stream.write_all(&piece).is_err() {
                return;
            }
        }
    });
    let begun = std::time::Instant::now();
    let (ended, result) = load(addr, &["echo", "-c", "4", "--workers", "2", "--warmup", "0s", "-d", "60s"]);
    assert!(begun.elapsed() < Duration::from_secs(30), "noticed at once: {:?}", begun.elapsed());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(result["window"]["replied"], 40, "{ended:?}");
    assert!(ended.stderr.contains("result      FAILED: stopped early: all connections"), "{ended:?}");
}

#[test]
fn connections_that_were_never_established_fail_the_run() {
    let server = Server::start(&["echo"]);
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("address");
    let target = format!("{},{free}", server.addr);
    let ended = run(&["load", "echo", "--target", &target, "-c", "4", "-d", "200ms", "--warmup", "0s"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.contains("FAILED: 2 of 4 connections were never established"), "{ended:?}");
}

#[test]
fn what_had_no_connection_was_not_measured() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("address");
    let args = ["echo", "-c", "2", "--fail-if", "errors>1k", "--fail-if", "error_rate>50%"];
    let (ended, result) = load(free, &args);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    for threshold in result["thresholds"].as_array().expect("an array") {
        assert!(threshold["value"].is_null() && threshold["failed"] == true, "{threshold}");
    }
    assert!(ended.stderr.contains("not measured"), "{ended:?}");
}

/// The tool with its output going where it cannot go.
fn full(args: &[&str], stdout: bool, stderr: bool) -> Option<i32> {
    let sink = |full: bool| {
        let path = if full { "/dev/full" } else { "/dev/null" };
        std::fs::File::options().write(true).open(path).expect("a device")
    };
    let mut command = corelane(args);
    command.stdin(std::process::Stdio::null()).stdout(sink(stdout)).stderr(sink(stderr));
    command.status().expect("runs").code()
}

#[test]
fn output_that_cannot_be_written_is_no_panic() {
    let server = Server::start(&["echo"]);
    let target = server.addr.to_string();
    let file = std::env::temp_dir().join(format!("corelane-full-{}.json", std::process::id()));
    let path = file.to_str().expect("a path");
    let args = ["load", "echo", "--target", &target, "-c", "2", "-d", "200ms", "--warmup", "0s", "--json"];
    // The table has nowhere to go; the document is written all the same.
    assert_eq!(full(&[&args[..], &[path]].concat(), true, true), Some(1));
    let text = std::fs::read_to_string(&file).expect("written");
    let _ = std::fs::remove_file(&file);
    assert_eq!(serde_json::from_str::<Value>(&text).expect("JSON")["schema"], "corelane-load/1");
    assert_eq!(full(&[&args[..], &["-"]].concat(), true, false), Some(1));
    assert_eq!(full(&[&args[..], &["/dev/full"]].concat(), false, false), Some(1));
    // What is said on standard error is not the result.
    assert_eq!(full(&[&args[..], &["-"]].concat(), false, true), Some(0));
    assert_eq!(full(&["serve", "echo", "--listen", "127.0.0.1:0"], true, true), Some(1));
    assert_eq!(full(&["serve", "echo", "--listen", "nowhere"], true, true), Some(2));
}

#[test]
fn replies_of_another_connection_are_noticed() {
    // Answers every message with the very first one it ever got.
    let first = std::sync::Arc::new(std::sync::OnceLock::new());
    let addr = server(move |mut stream| {
        let mut piece = [0; 64];
        while stream.read_exact(&mut piece).is_ok() {
            if stream.write_all(first.get_or_init(|| piece)).is_err() {
                return;
            }
        }
    });
    let (_, result) = load(addr, &["echo", "-c", "5"]);
    assert_eq!(result["errors"]["server"]["reply_mismatch"], 5, "{result}");
}

#[test]
fn a_silent_server_shows_as_timeouts_in_the_percentiles() {
    let addr = server(|mut stream| {
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let (ended, result) =
        load(addr, &["echo", "-c", "4", "--pipeline", "2", "--timeout", "200ms", "--warmup", "0s"]);
    assert_eq!(ended.code, Some(1), "nothing was answered: {ended:?}");
    let window = &result["window"];
    assert_eq!(window["timed_out"], 8, "{ended:?}");
    assert_eq!(window["error_rate"], 1.0);
    assert!(window["response_us"]["p50_us"].as_f64() >= Some(199_000.0), "{window}");
    // By the clock, beats that could not be sent count too.
    let args = ["heartbeat", "-c", "4", "--interval", "100ms", "--timeout", "200ms", "--warmup", "0s"];
    let (_, result) = load(addr, &args);
    let window = &result["window"];
    assert_eq!(window["planned"], 20, "{window}");
    assert_eq!(window["replied"], 0);
    assert_eq!(window["error_rate"], 1.0);
    let sum: u64 =
        ["timed_out", "lost", "missed", "gone"].iter().filter_map(|name| window[*name].as_u64()).sum();
    assert_eq!(sum, 20, "each planned message has one fate: {window}");
}

#[test]
fn a_slow_server_cannot_hide_behind_the_clients_it_delays() {
    // Takes 30 ms for each reply, and is asked every 10 ms.
    let addr = server(|mut stream| {
        let mut line = [0; 5];
        while stream.read_exact(&mut line).is_ok() {
            thread::sleep(Duration::from_millis(30));
            if stream.write_all(b"pong\n").is_err() {
                return;
            }
        }
    });
    let args = ["heartbeat", "-c", "2", "--interval", "10ms", "--warmup", "0s", "-d", "300ms", "--overlap"];
    let (_, skip) = load(addr, &[&args[..], &["skip"]].concat());
    let window = &skip["window"];
    assert_eq!(window["planned"], 60, "{window}");
    assert!(window["missed"].as_u64() >= Some(36), "{window}");
    let (_, queue) = load(addr, &[&args[..], &["queue", "--timeout", "5s"]].concat());
    let window = &queue["window"];
    assert_eq!(window["planned"], 60, "{window}");
    assert_eq!(window["replied"], 60, "what is owed is sent: {window}");
    let micros = |pointer: &str| window.pointer(pointer).and_then(Value::as_f64).expect("a number");
    // The last of 30 replies comes after 900 ms, and was due at 290 ms.
    assert!(micros("/response_us/max_us") > 550_000.0, "from when it was due: {window}");
    assert!(micros("/service_us/p50_us") < 200_000.0, "from when it was sent: {window}");
}

#[test]
fn a_server_that_hangs_up_shows_as_lost_and_gone() {
    // Answers three times, then closes; every other connection stays, so that the run goes on.
    let count = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
    let addr = server(move |mut stream| {
        let stays = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 2 == 1;
        let mut line = [0; 5];
        let mut answers = 0;
        while stays || answers < 3 {
            if stream.read_exact(&mut line).is_err() || stream.write_all(b"pong\n").is_err() {
                return;
            }
            answers += 1;
        }
    });
    let args = ["heartbeat", "-c", "6", "--interval", "50ms", "--warmup", "0s", "-d", "1s"];
    let (ended, result) = load(addr, &args);
    let (window, errors) = (&result["window"], &result["errors"]["server"]);
    let closed = errors["recv_eof"].as_u64().unwrap_or(0) + errors["recv_reset"].as_u64().unwrap_or(0);
    assert_eq!(closed, 3, "{ended:?}");
    assert!(window["gone"].as_u64() > Some(0), "{window}");
    assert_eq!(window["open_at_end"], 3);
    went_well(&ended);
    let fates = ["replied", "timed_out", "lost", "missed", "gone"];
    let sum: u64 = fates.iter().filter_map(|name| window[*name].as_u64()).sum();
    assert_eq!(window["planned"], sum, "each planned message has one fate: {window}");
}

#[test]
fn a_foreign_server_is_measured() {
    let script = r#"
import asyncio
async def echo(reader, writer):
    while data := await reader.read(4096):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1])
    async with server:
        await server.serve_forever()
asyncio.run(main())
"#;
    let Some(mut server) = python(script) else { return };
    let addr = format!("127.0.0.1:{}", server.line()).parse().expect("a port");
    let pid = server.id().to_string();
    let args = ["echo", "-c", "10", "--size", "1KiB", "--server-pid", &pid, "--fail-if", "errors>0"];
    let (ended, result) = load(addr, &args);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(result["server"]["rss_end_bytes"].as_u64() > Some(1 << 20), "{}", result["server"]);
    assert!(result["server"]["cpu_us_per_message"].as_f64() > Some(0.0), "{}", result["server"]);
    let args =
        ["heartbeat", "-c", "50", "--interval", "100ms", "--expect", r"ping\n", "--fail-if", "error_rate>0"];
    let (ended, _) = load(addr, &args);
    went_well(&ended);
}

#[test]
fn an_interrupt_gives_what_there_is() {
    let server = Server::start(&["heartbeat"]);
    let args = command(server.addr, &["heartbeat", "-c", "50", "--interval", "100ms", "-d", "1h"]);
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let mut process = Process::spawn(&mut corelane(&args));
    process.said("measure");
    process.signal("-INT");
    let ended = process.end();
    assert_eq!(ended.code, Some(130), "{ended:?}");
    let result = result(&ended);
    assert_eq!(result["verdict"]["interrupted"], true);
    assert!(result["window"]["replied"].as_u64() > Some(50), "{ended:?}");
    assert_eq!(result["errors"]["server_total"], 0, "{ended:?}");
    assert!(ended.stderr.contains("INTERRUPTED"), "{ended:?}");
}
