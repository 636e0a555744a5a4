//! Many long connections, held by the tool against itself: the README's claims about memory and
//! errors at a size that a test run can afford. The full size is `benches/scale.sh`.
#![cfg(all(feature = "cli", target_os = "linux"))]

mod cli_support;

use cli_support::{Server, run};
use serde_json::Value;

/// 15,000 heartbeat connections, both ends on direct descriptors, neither process near its limit
/// of 20,000 by its own descriptors: no error, and an idle connection costs the server no more than
/// 256 bytes of user memory beyond its fixed buffers (resident memory before the first connection
/// against resident memory with all of them, over their number).
#[test]
fn fifteen_thousand_heartbeats_without_an_error_in_256_bytes_each() {
    let server = Server::start(&["heartbeat", "--listen", "0.0.0.0:0", "--max-connections", "15000"]);
    let port = server.addr.port();
    let (target, pid) = (format!("127.0.0.1-4:{port}"), server.process.id().to_string());
    let ended = run(&[
        "load",
        "heartbeat",
        "--target",
        &target,
        "-c",
        "15k",
        "--interval",
        "5s",
        "--ramp",
        "10k/s",
        "--warmup",
        "1s",
        "-d",
        "5s",
        "--timeout",
        "5s",
        "--server-pid",
        &pid,
        "--json",
        "-",
        "--quiet",
        "--fail-if",
        "errors>0",
    ]);
    let result: Value = serde_json::from_str(&ended.stdout)
        .unwrap_or_else(|error| panic!("{error}: '{}' '{}'", ended.stdout, ended.stderr));
    // A slow machine makes the generator late (exit code 5), which says nothing of the server.
    assert!(matches!(ended.code, Some(0 | 5)), "{:?}: {}", ended.code, ended.stderr);
    assert_eq!(result["ramp"]["connected"], 15_000, "{}", ended.stderr);
    assert_eq!(result["window"]["open_at_end"], 15_000);
    assert_eq!(result["errors"]["server_total"], 0, "{}", result["errors"]);
    let memory = result["server"]["rss_bytes_per_connection"].as_f64().expect("measured");
    assert!(memory <= 256.0, "{memory} bytes of resident memory per connection");
    let stopped = server.stop();
    assert_eq!(stopped.code, Some(0), "{}", stopped.stderr);
    let counters = "0 operations left in the kernel, 0 buffers outstanding";
    assert!(stopped.stderr.contains(counters), "{}", stopped.stderr);
}
