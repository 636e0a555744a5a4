//! The JSON documents keep to `docs/json-schema.md`: every field is there, of its type, and every
//! field that is written is on that page.
#![cfg(all(feature = "cli", target_os = "linux"))]

mod cli_support;

use cli_support::{Server, run};
use serde_json::Value;

const PAGE: &str = include_str!("../docs/json-schema.md");

/// Fields whose names are data and not on the page.
const FREE: [&str; 1] = ["counters"];

/// Every name in the document must be on the page.
fn on_the_page(value: &Value, path: &str) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let shown = [
                    format!("`{name}`"),
                    format!(".{name}`"),
                    format!("{{{name},"),
                    format!(" {name},"),
                    format!(" {name}}}"),
                ];
                assert!(shown.iter().any(|text| PAGE.contains(text)), "{path}.{name} is not documented");
                if !FREE.contains(&name.as_str()) {
                    on_the_page(value, &format!("{path}.{name}"));
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| on_the_page(item, path)),
        _ => {}
    }
}

/// `path` ends in the type: `s`tring, `n`umber, `i`nteger, `b`oolean, `a`rray, `o`bject; with `?`
/// null is allowed too.
fn check(document: &Value, fields: &str) {
    for field in fields.split_whitespace() {
        let (path, kind) = field.rsplit_once(':').expect("path:type");
        let (kind, optional) = match kind.strip_suffix('?') {
            Some(kind) => (kind, true),
            None => (kind, false),
        };
        let pointer = format!("/{}", path.replace('.', "/"));
        let value = document.pointer(&pointer).unwrap_or_else(|| panic!("no field {path}"));
        let right = match kind {
            "s" => value.is_string(),
            "n" => value.is_number(),
            "i" => value.is_u64(),
            "b" => value.is_boolean(),
            "a" => value.is_array(),
            "o" => value.is_object(),
            _ => unreachable!("{kind}"),
        };
        assert!(right || (optional && value.is_null()), "{path} is {value}, not {kind}");
    }
}

const TOOL: &str = "schema:s tool.name:s tool.version:s tool.command:a environment.kernel:s? environment.cpu_model:s? \
    environment.cpus_allowed:a environment.open_files_limit:i? environment.local_ports:a? environment.backend:s environment.fallback:s? \
    environment.features:a environment.features.0.name:s environment.features.0.on:b environment.features.0.why:s \
    environment.workers:a environment.workers.0.index:i environment.workers.0.cpu:i? \
    environment.workers.0.descriptors:s environment.workers.0.max_connections:i environment.warnings:a";

const PERCENTILES: [&str; 8] =
    ["count:i", "min_us:n", "mean_us:n", "p50_us:n", "p90_us:n", "p99_us:n", "p999_us:n", "max_us:n"];

fn check_load(result: &Value) {
    assert_eq!(result["schema"], "corelane-load/1");
    check(result, TOOL);
    check(
        result,
        "config.mode:s config.loop_kind:s config.targets:a config.sources:a config.connections:i config.workers:i \
         config.ramp_per_s:n config.warmup_s:n config.duration_s:n config.timeout_s:n config.connect_timeout_s:n \
         config.size_bytes:i config.pipeline:i config.rate_per_s:n? config.interval_s:n? config.phase:s? \
         config.overlap:s? config.payload:s? config.expect:s? config.server_pid:i? \
         ramp.attempted:i ramp.connected:i ramp.failed:i ramp.duration_s:n ramp.rate_per_s:n \
         window.duration_s:n window.planned:i window.sent:i window.replied:i window.timed_out:i window.lost:i \
         window.missed:i window.gone:i window.late_replies:i window.messages_per_s:n window.sent_bytes_per_s:n \
         window.received_bytes_per_s:n window.error_rate:n window.open_at_end:i \
         errors.server_total:i errors.generator_total:i errors.before_window:i errors.first_mismatch:s? \
         errors.server.connect_refused:i errors.server.connect_reset:i errors.server.connect_timeout:i \
         errors.server.connect_unreachable:i errors.server.connect_failed:i errors.server.recv_reset:i \
         errors.server.recv_eof:i errors.server.reply_timeout:i errors.server.reply_mismatch:i \
         errors.server.send_failed:i errors.generator.local_fd_limit:i errors.generator.local_addr_unavailable:i \
         errors.generator.local_nobufs:i errors.generator.generator_late:i \
         generator.rate_ratio:n? generator.cpu_s:n? generator.cpu_cores:n? generator.busy_ratio:n \
         generator.enters_per_message:n \
         server.pid:i server.cpu_s:n server.cpu_us_per_message:n? server.rss_before_bytes:i \
         server.rss_connected_bytes:i server.rss_end_bytes:i server.rss_peak_bytes:i server.rss_bytes_per_connection:n? \
         intervals.0.start_s:n intervals.0.end_s:n intervals.0.phase:s intervals.0.open:i intervals.0.connecting:i \
         intervals.0.failed:i intervals.0.replied:i intervals.0.messages_per_s:n intervals.0.error_rate:n \
         intervals.0.p50_us:n? intervals.0.p99_us:n? \
         thresholds.0.expression:s thresholds.0.value:n? thresholds.0.unit:s thresholds.0.failed:b \
         verdict.valid:b verdict.passed:b verdict.failed:b verdict.interrupted:b verdict.exit_code:i verdict.reasons:a verdict.notes:a",
    );
    for percentiles in ["ramp.connect_us", "window.response_us"] {
        let fields: Vec<_> = PERCENTILES.iter().map(|field| format!("{percentiles}.{field}")).collect();
        check(result, &fields.join(" "));
    }
    on_the_page(result, "load");
}

#[test]
fn a_load_result_keeps_to_its_schema() {
    let server = Server::start(&["heartbeat"]);
    let pid = server.process.id().to_string();
    let target = server.addr.to_string();
    let file = std::env::temp_dir().join(format!("corelane-test-{}.json", std::process::id()));
    let path = file.to_str().expect("a path");
    let ended = run(&[
        "load",
        "heartbeat",
        "--target",
        &target,
        "-c",
        "20",
        "--interval",
        "100ms",
        "-d",
        "1s",
        "--warmup",
        "0s",
        "--server-pid",
        &pid,
        "--fail-if",
        "errors>0",
        "--json",
        path,
    ]);
    let text = std::fs::read_to_string(&file);
    let _ = std::fs::remove_file(&file);
    // 5: a machine too busy for the schedule; the document is whole all the same.
    assert!(matches!(ended.code, Some(0 | 5)), "{ended:?}");
    assert!(ended.stdout.contains("\nresult      "), "the table stays on standard output: {ended:?}");
    let result: Value = serde_json::from_str(&text.expect("written")).expect("JSON");
    check_load(&result);
    for percentiles in ["window.service_us", "generator.lag_us"] {
        let fields: Vec<_> = PERCENTILES.iter().map(|field| format!("{percentiles}.{field}")).collect();
        check(&result, &fields.join(" "));
    }
}

#[test]
fn the_bench_runs_and_its_result_keeps_to_its_schema() {
    let ended = run(&["bench", "--quick", "--json", "-"]);
    // 5: a machine too busy for its own schedule; the document is whole all the same.
    assert!(matches!(ended.code, Some(0 | 5)), "{ended:?}");
    let result: Value =
        serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    assert_eq!(result["schema"], "corelane-bench/1");
    check(&result, TOOL);
    check(&result, "quick:b server_cpu:i load_cpu:i shared_core:b scenarios:a");
    let scenarios = result["scenarios"].as_array().expect("an array");
    assert_eq!(scenarios.len(), 3);
    for scenario in scenarios {
        check(
            scenario,
            "name:s messages_per_s:n p50_us:n p99_us:n p999_us:n server_cpu_us_per_message:n? \
             server_rss_bytes_per_connection:n? server_enters_per_message:n? errors:i valid:b load:o server:o",
        );
        assert_eq!(scenario["errors"], 0, "{ended:?}");
        let server = &scenario["server"];
        assert_eq!(server["schema"], "corelane-serve/1");
        check(server, TOOL);
        check(
            server,
            "finished:i aborted:i ops_in_kernel:i buffers_outstanding:i counters.messages:i counters.enters:i",
        );
        assert_eq!(server["ops_in_kernel"], 0);
    }
    on_the_page(&result, "bench");
    let name = scenarios[0]["name"].as_str().expect("a name");
    assert!(ended.stderr.contains(name) && ended.stderr.contains("enters/msg"), "{ended:?}");
}
