//! The second load tool: what `corelane load` does not do (streams, churn, slow readers, holding idle connections), its
//! independent check (`echo`), and the check of the machine's state (`calibrate`).
//!
//! One thread on mio, written apart from corelane. Every byte that comes back is compared. Each command prints one line
//! of JSON.

mod calibrate;
mod flow;
mod modes;
mod usage;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process;
use std::time::Duration;

/// What was asked for.
#[derive(Clone, Debug)]
pub struct Plan {
    pub target: SocketAddr,
    /// Local addresses, used in turn; none: the system chooses.
    pub sources: Vec<IpAddr>,
    pub connections: usize,
    /// `slow`: how many more connections read slowly.
    pub slow: usize,
    pub size: usize,
    pub pipeline: usize,
    pub window: Duration,
    pub warmup: Duration,
    /// Process whose resources are measured over the window.
    pub server: Option<u32>,
}

fn usage_error(what: &str) -> ! {
    eprintln!(
        "{what}\nusage: client echo|churn|stream|slow|idle --target ADDR [--sources N] [--connections N] [--slow N] \
         [--size BYTES] [--pipeline N] [--seconds S] [--warmup S] [--server-pid PID] [--cpu N]\n       \
         client calibrate [--cpus A,B]"
    );
    process::exit(2)
}

fn main() {
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_else(|| usage_error("no command"));
    let mut plan = Plan {
        target: SocketAddr::from((Ipv4Addr::LOCALHOST, 7000)),
        sources: Vec::new(),
        connections: 64,
        slow: 16,
        size: 64,
        pipeline: 1,
        window: Duration::from_secs(3),
        warmup: Duration::from_millis(500),
        server: None,
    };
    let mut cpus = (0, 1);
    while let Some(flag) = args.next() {
        let value = args.next().unwrap_or_else(|| usage_error(&format!("{flag} has no value")));
        let bad = || -> ! { usage_error(&format!("{flag} {value}: not understood")) };
        let number = || value.parse::<usize>().unwrap_or_else(|_| bad());
        let seconds = || Duration::from_secs_f64(value.parse().unwrap_or_else(|_| bad()));
        match flag.as_str() {
            "--target" => plan.target = value.parse().unwrap_or_else(|_| bad()),
            // 127.0.0.2 and on: every address has ports of its own.
            "--sources" => {
                plan.sources = (0..number())
                    .map(|n| IpAddr::from([127, 0, (n / 250) as u8, (n % 250 + 2) as u8]))
                    .collect();
            }
            "--connections" => plan.connections = number(),
            "--slow" => plan.slow = number(),
            "--size" => plan.size = number().max(1),
            "--pipeline" => plan.pipeline = number().max(1),
            "--seconds" => plan.window = seconds(),
            "--warmup" => plan.warmup = seconds(),
            "--server-pid" => plan.server = Some(number() as u32),
            "--cpu" => calibrate::pin(number()),
            "--cpus" => match value.split_once(',').map(|(a, b)| (a.parse(), b.parse())) {
                Some((Ok(a), Ok(b))) => cpus = (a, b),
                _ => bad(),
            },
            _ => usage_error(&format!("{flag}: not understood")),
        }
    }
    let done = match command.as_str() {
        "echo" => modes::echo(&plan),
        "churn" => modes::churn(&plan),
        "stream" => modes::stream(&plan),
        "slow" => modes::slow(&plan),
        "idle" => modes::idle(&plan),
        "calibrate" => Ok(calibrate::calibrate(cpus)),
        other => usage_error(&format!("{other}: no such command")),
    };
    match done {
        Ok(line) => println!("{line}"),
        Err(error) => {
            eprintln!("{error}");
            process::exit(1);
        }
    }
}
