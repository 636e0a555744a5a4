//! Wrong calls: each refusal names its cause and its remedy, and exits with 2, or 4 when it is the
//! machine that cannot.
#![cfg(all(feature = "cli", target_os = "linux"))]

mod cli_support;

use cli_support::run;

#[track_caller]
fn refused(args: &[&str], code: i32, parts: &[&str]) {
    let ended = run(args);
    assert_eq!(ended.code, Some(code), "{args:?}: {ended:?}");
    assert_eq!(ended.stdout, "", "{args:?}: nothing but results on standard output");
    for part in parts {
        assert!(ended.stderr.contains(part), "{args:?}: no '{part}' in {}", ended.stderr);
    }
}

#[test]
fn bad_values_name_the_flag_and_what_would_be_right() {
    refused(&["load", "echo", "--target", "127.0.0.1"], 2, &["--target", "no port", "127.0.0.1:7000"]);
    refused(&["load", "echo", "-d", "5"], 2, &["--duration", "5s or 5ms"]);
    refused(&["load", "echo", "-c", "0"], 2, &["--connections", "at least 1"]);
    refused(&["load", "echo", "-c", "10x"], 2, &["10k"]);
    refused(&["load", "echo", "--fail-if", "p99>20"], 2, &["--fail-if", "20ms"]);
    refused(&["load", "echo", "--fail-if", "p98>1ms"], 2, &["unknown metric", "p99.9"]);
    refused(&["load", "echo", "--fail-if", "server_cpu>5us"], 2, &["--server-pid"]);
    refused(&["load", "echo", "--rate", "fast"], 2, &["--rate"]);
    refused(&["load", "heartbeat", "--payload", r"\q"], 2, &["--payload", r"\xNN"]);
    refused(&["load", "heartbeat", "--source", "127.0.0.9-2"], 2, &["--source", "2-9"]);
    refused(&["serve", "echo", "--listen", "7000"], 2, &["--listen", "127.0.0.1:7000"]);
    refused(&["serve", "echo", "--buffers", "8KiB"], 2, &["--buffers", "8KiBx512"]);
    refused(&["serve", "echo", "--buffers", "8x512"], 2, &["size 8", "64 to 1048576"]);
    refused(&["serve", "echo", "--dual-stack"], 2, &["[::]"]);
    refused(&["serve", "echo", "--wait", "nap"], 2, &["--wait", "spin=50us", "adaptive=1ms"]);
    refused(&["load", "echo", "--wait", "spin=1s"], 2, &["--wait", "spin=50us"]);
    refused(&["serve", "echo", "--wait", "coalesce=1000ms"], 2, &["--wait", "1µs to 100ms"]);
    refused(&["serve", "telnet"], 2, &["echo, heartbeat, discard"]);
    refused(&["load", "echo", "--workers"], 2, &["--workers"]);
    refused(&["load", "echo", "--source", "::1"], 2, &["family"]);
    refused(&["load", "echo", "--overlap", "skip"], 2, &["--rate"]);
    refused(&["load", "echo", "--fail-if", "error_rate>5"], 2, &["--fail-if", "did you mean 5%"]);
    refused(&["load", "heartbeat", "--interval", "10us"], 2, &["--interval", "at least 1ms"]);
    refused(&["load", "echo", "--size", "-5"], 2, &["--size", "'-5' is negative"]);
    refused(&["load", "echo", "-d", "-5s"], 2, &["--duration", "'-5s' is negative"]);
    refused(&["serve", "heartbeat", "--max-line", "2B"], 2, &["--max-line", "at least 5"]);
    refused(&["serve", "heartbeat", "--max-line", "1x"], 2, &["--max-line", "KiB"]);
    for args in [&["load", "echo", "--json"][..], &["serve", "echo", "--report-json"], &["bench", "--json"]] {
        let path = "/nonexistent/result.json";
        refused(&[args, &[path]].concat(), 2, &[args[args.len() - 1], path, "No such file"]);
    }
}

#[test]
fn what_the_machine_cannot_do_is_refused_before_it_is_tried() {
    refused(&["load", "echo", "-c", "1m"], 4, &["1,000,000", "ip_local_port_range", "--target 127.0.0.1-"]);
    refused(&["load", "echo", "--source", "192.0.2.77"], 4, &["192.0.2.77", "no interface of this machine"]);
}

#[test]
fn every_help_has_an_example() {
    for args in [
        &["--help"][..],
        &["serve", "--help"],
        &["load", "echo", "--help"],
        &["load", "heartbeat", "--help"],
        &["bench", "--help"],
    ] {
        let ended = run(args);
        assert_eq!(ended.code, Some(0));
        assert!(ended.stdout.contains("Examples:\n  corelane "), "{args:?}: {}", ended.stdout);
    }
    assert!(run(&["--version"]).stdout.starts_with("corelane 0."));
}
