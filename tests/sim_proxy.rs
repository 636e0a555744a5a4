//! A proxy on the simulated kernel: two connections whose back-pressure, half-closes and ends depend
//! on each other. The handler is that of `examples/proxy.rs`.

mod sim_common;

use corelane::sim::{Faults, Peer, Sim, SimConfig};
use corelane::{Accepted, Buf, BufferConfig, Closed, Conn, ConnId, ConnectConfig, Cx, Handler, WorkerConfig};
use sim_common::*;

struct Proxy;

impl Handler for Proxy {
    /// The other side.
    type Conn = ConnId;
    type Message = ();

    fn on_accept(&mut self, cx: &mut Cx<'_, Self>, accepted: Accepted) -> Option<ConnId> {
        cx.connect(ConnectConfig::new(other_addr()), accepted.id).ok()
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        let other = *conn.state();
        let Some(mut other) = conn.other(other) else { return conn.close() };
        let sent = other.send(data).is_ok();
        if other.is_congested() {
            conn.pause();
        }
        if !sent {
            conn.close();
        }
    }

    fn on_writable(&mut self, conn: &mut Conn<'_, Self>) {
        let other = *conn.state();
        if let Some(mut other) = conn.other(other) {
            other.resume();
        }
    }

    fn on_eof(&mut self, conn: &mut Conn<'_, Self>) {
        let other = *conn.state();
        match conn.other(other) {
            Some(mut other) => other.shutdown_write(),
            None => conn.close(),
        }
    }

    fn on_closed(&mut self, cx: &mut Cx<'_, Self>, closed: Closed<ConnId>) {
        if let Some(mut other) = cx.conn(closed.state) {
            other.close();
        }
    }
}

/// The two foreign ends of one proxied connection, and what each sends.
struct Pair {
    client: Peer,
    request: Vec<u8>,
    server: Option<Peer>,
    answer: Vec<u8>,
}

#[test]
fn a_proxy_carries_both_directions_whole_whoever_is_slow() {
    for seed in seeds(120) {
        let sim = Sim::new(SimConfig {
            socket_buffer: 2_048 << (seed % 4),
            faults: Faults::benign(if seed % 2 == 0 { 0.1 } else { 0.0 }),
            ..SimConfig::seeded(seed)
        });
        let config = WorkerConfig {
            buffers: BufferConfig {
                size: 512,
                count: 8 + seed as u32 % 64,
                send_count: 0,
                ..BufferConfig::default()
            },
            ..small_on(seed)
        };
        let worker = sim.worker(config, &[listener()], Proxy).expect("it works");
        let backend = sim.listen(other_addr());
        sim.run_for(millis(1));
        let accepts = worker.ops_in_flight();
        // One after the other, so that the backend's connections are in the clients' order.
        let mut pairs: Vec<Pair> = Vec::new();
        for n in 0..4 {
            let client = sim.connect(addr());
            let server = std::cell::RefCell::new(None);
            sim.run_until(MINUTE, || {
                *server.borrow_mut() = backend.accept();
                server.borrow().is_some()
            })
            .unwrap_or_else(|stuck| panic!("{stuck}"));
            let request = pattern(seed * 8 + n, sim.random(60_000) as usize);
            let answer = pattern(seed * 8 + n + 4, sim.random(60_000) as usize);
            pairs.push(Pair { client, request, server: server.take(), answer });
        }
        for Pair { client, request, server, answer } in &pairs {
            let server = server.as_ref().expect("it was accepted");
            client.set_reading(sim.random(2) == 0);
            server.set_reading(sim.random(2) == 0);
            client.send(request);
            client.shutdown();
            server.send(answer);
            server.shutdown();
        }
        sim.run_for(millis(200));
        let high = 8 << 10;
        let bound = pairs.len() * 2 * (high + 40 * 512);
        assert!(worker.metrics().bytes_received - worker.metrics().bytes_sent <= bound as u64);
        for Pair { client, request, server, answer } in &pairs {
            let server = server.as_ref().expect("it was accepted");
            client.set_reading(true);
            server.set_reading(true);
            sim.run_until(MINUTE, || client.is_eof() && server.is_eof())
                .unwrap_or_else(|stuck| panic!("{stuck}"));
            assert!(client.received() == *answer, "seed {seed}: the answer differs");
            assert!(server.received() == *request, "seed {seed}: the request differs");
            assert!(!client.is_reset() && !server.is_reset());
        }
        drop(pairs);
        sim.run_until(MINUTE, || worker.connections() == 0).unwrap_or_else(|stuck| panic!("{stuck}"));
        sim.run_for(SECOND);
        assert_at_rest(&worker, accepts);
    }
}

#[test]
fn when_one_side_goes_the_other_goes_too() {
    for seed in seeds(120) {
        let sim = Sim::new(SimConfig {
            faults: Faults::benign(if seed % 2 == 0 { 0.1 } else { 0.0 }),
            ..SimConfig::seeded(seed)
        });
        let worker = sim.worker(small_on(seed), &[listener()], Proxy).expect("it works");
        let backend = (seed % 4 > 0).then(|| sim.listen(other_addr()));
        let client = sim.connect(addr());
        client.send(b"hello");
        sim.run_for(millis(sim.random(3)));
        let server = backend.as_ref().and_then(|backend| backend.accept());
        match (&server, sim.random(3)) {
            (Some(server), 0) => server.reset(),
            (Some(server), 1) => server.close(),
            (_, 2) => client.reset(),
            _ => client.close(),
        }
        sim.run_for(MINUTE);
        if let Some(server) = &server {
            assert!(server.is_over(), "seed {seed}");
            server.close();
        }
        // Without a backend, the refusal ends the client's connection.
        assert!(client.is_over(), "seed {seed}");
        drop((client, backend));
        sim.run_for(MINUTE);
        assert_eq!(worker.connections(), 0, "seed {seed}");
        assert_eq!(worker.buffers_leased(), 0);
        assert_eq!(worker.payloads_queued(), 0);
    }
}
