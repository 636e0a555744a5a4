//! `--tier`: servers and generators as callbacks and as async tasks, which are the same on the wire.
#![cfg(feature = "cli")]

mod cli_support;

use cli_support::{Process, corelane};
use serde_json::Value;

#[test]
fn both_tiers_serve_and_load_each_other_and_say_which_they_are() {
    for (serve, load) in [("async", "async"), ("async", "handler"), ("handler", "async")] {
        for kind in ["echo", "heartbeat"] {
            let mut command = corelane(&["serve", kind, "--listen", "127.0.0.1:0", "--report-json", "-"]);
            command.args(["--until-stdin-ends", "--tier", serve]);
            let mut server = Process::spawn(&mut command);
            let line = server.line();
            let target = line.strip_prefix("listening on ").expect("ready");
            let mut command = corelane(&["load", kind, "--target", target, "-c", "20", "-d", "300ms"]);
            command.args(["--warmup", "50ms", "--tier", load, "--json", "-"]);
            if kind == "heartbeat" {
                command.args(["--interval", "50ms"]);
            }
            let ended = Process::spawn(&mut command).end();
            // 5: a machine too busy to say anything about the server; the document is whole all the same.
            assert!(matches!(ended.code, Some(0 | 5)), "{ended:?}");
            let result: Value = serde_json::from_str(&ended.stdout).expect("a document");
            assert_eq!(result["environment"]["tier"], load);
            assert!(result["window"]["replied"].as_u64().expect("a number") > 0, "{result}");
            assert_eq!(result["errors"]["server_total"], 0, "{result}");
            drop(server.stdin.take());
            let served = server.end();
            assert_eq!(served.code, Some(0), "{served:?}");
            let document: Value = serde_json::from_str(&served.stdout).expect("a document");
            assert_eq!(document["environment"]["tier"], serve);
            assert_eq!(document["aborted"], 0, "{document}");
            assert_eq!(document["counters"]["accepted"], 20, "{document}");
        }
    }
}

#[test]
fn a_generator_of_tasks_counts_refused_connections_as_the_other_does() {
    for tier in ["handler", "async"] {
        // Bound, and dropped: nobody listens there.
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").expect("bound").local_addr().expect("known");
        let target = nobody.to_string();
        let mut command = corelane(&["load", "echo", "--target", &target, "-c", "5", "-d", "100ms"]);
        let ended = Process::spawn(command.args(["--tier", tier, "--json", "-"])).end();
        assert_eq!(ended.code, Some(1), "{ended:?}");
        let result: Value = serde_json::from_str(&ended.stdout).expect("a document");
        assert_eq!(result["errors"]["server"]["connect_refused"], 5, "{tier}: {}", result["errors"]);
        assert_eq!(result["ramp"]["connected"], 0);
    }
}

#[test]
fn a_tier_that_is_none_is_a_wrong_call_and_lists_those_that_are() {
    for command in ["serve", "load"] {
        let ended = Process::spawn(corelane(&[command, "echo"]).args(["--tier", "threads"])).end();
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains("handler, async"), "{}", ended.stderr);
    }
}
