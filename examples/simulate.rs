//! Testing a server of one's own on the simulated kernel: 200 seeds, everything going wrong, then
//! nothing going wrong and progress required.
//!
//! `cargo run --release --example simulate` explores and prints what it went through; with `-- broken` the
//! server takes what arrives at once for a whole line, and the seed under which that shows is printed.
//! `CORELANE_SIM_SEEDS=17 cargo run --example simulate` runs one seed again.

use std::error::Error;
use std::rc::Rc;
use std::time::Duration;

use corelane::sim::{Exploration, Faults, Peer, Sim, SimConfig};
use corelane::{Accepted, Buf, BufferConfig, Conn, Cx, Handler, ListenerConfig, WorkerConfig};

/// Adds up the numbers that a client sends, one a line, and answers each with the sum so far.
struct Adder {
    /// Takes what arrives at once for a whole line.
    broken: bool,
}

#[derive(Default)]
struct Account {
    line: Vec<u8>,
    sum: u64,
}

impl Handler for Adder {
    type Conn = Account;
    type Message = ();

    fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<Account> {
        Some(Account::default())
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        let account = conn.state();
        let mut answer = String::new();
        account.line.extend_from_slice(&data);
        while !account.line.is_empty() {
            let end = account.line.iter().position(|byte| *byte == b'\n');
            let end = if self.broken { Some(end.unwrap_or(account.line.len() - 1)) } else { end };
            let Some(end) = end else { break };
            let line: Vec<u8> = account.line.drain(..=end).collect();
            let number = String::from_utf8_lossy(&line).trim().parse::<u64>();
            let Ok(number) = number else { return conn.abort() };
            account.sum += number;
            answer.push_str(&format!("{}\n", account.sum));
        }
        if !answer.is_empty() && conn.send(answer.into_bytes()).is_err() {
            conn.abort();
        }
    }
}

/// A client's requests and the answers that they must get.
fn dialogue(sim: &Sim) -> (String, String) {
    let (mut requests, mut answers, mut sum) = (String::new(), String::new(), 0);
    for _ in 0..1 + sim.random(50) {
        let number = sim.random(1_000_000);
        sum += number;
        requests.push_str(&format!("{number}\n"));
        answers.push_str(&format!("{sum}\n"));
    }
    (requests, answers)
}

fn scenario(sim: &Sim, broken: bool) -> Result<(), Box<dyn Error>> {
    let addr = "10.0.0.1:7000".parse()?;
    // Small, so that its limits are met, and so that a world costs little to make.
    let buffers = BufferConfig { size: 256, count: 16, send_count: 0, ..BufferConfig::default() };
    let config = WorkerConfig { max_connections: 16, mailbox: 16, buffers, ..WorkerConfig::default() };
    let worker = sim.worker(config, &[ListenerConfig::new(addr)], Adder { broken })?;
    let clients: Vec<(Rc<Peer>, String)> = (0..5)
        .map(|_| {
            let (requests, answers) = dialogue(sim);
            let client = Rc::new(sim.connect(addr));
            client.send(requests.as_bytes());
            (client, answers)
        })
        .collect();

    // Safety: whatever happens to the connections, no answer is ever wrong.
    for (client, answers) in clients.clone() {
        sim.always("answers are right", move || {
            let got = client.received();
            let right = answers.as_bytes().starts_with(&got);
            if right { Ok(()) } else { Err(format!("got {:?}", String::from_utf8_lossy(&got))) }
        });
    }
    sim.try_run_for(Duration::from_millis(300))?;

    // Liveness: without faults, every client whose connection lives has all its answers soon.
    sim.calm_until(Duration::from_secs(30), || {
        clients.iter().all(|(client, answers)| {
            client.received_len() == answers.len() as u64 || client.is_over() || client.is_refused()
        })
    })?;

    // And when they are gone, nothing of them is left.
    clients.iter().for_each(|(client, _)| client.close());
    sim.run_until(Duration::from_secs(1800), || worker.check_at_rest().is_ok())?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let broken = std::env::args().any(|arg| arg == "broken");
    let config = SimConfig { faults: Faults::hostile(0.05), tail: 15, ..SimConfig::default() };
    let explored = Exploration::new(config).seeds(200).run(|sim| scenario(sim, broken))?;
    println!("{explored}");
    Ok(())
}
