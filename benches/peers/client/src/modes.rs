//! The loads.

use std::collections::VecDeque;
use std::io::{self, Read as _};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use mio::{Events, Interest, Poll, Token};

use crate::Plan;
use crate::flow::{Flow, Pattern};
use crate::usage::{self, Usage};

/// How long the whole of a phase that has to end may take.
const PATIENCE: Duration = Duration::from_secs(15);
const BOTH: Interest = Interest::READABLE.add(Interest::WRITABLE);
/// A slow reader takes so much, so often: 400 KiB/s.
const SIP: usize = 4096;
const SIP_EVERY: Duration = Duration::from_millis(10);
/// And has at most so much on its way: more than the sockets hold, so that a server without back-pressure shows by its
/// memory, which is bounded all the same.
const SLOW_OUTSTANDING: u64 = 16 << 20;

/// Counting, from the end of the warm-up to the end of the window.
struct Meter<'a> {
    plan: &'a Plan,
    opens: Instant,
    closes: Instant,
    open: Option<(Instant, Option<Usage>)>,
    messages: u64,
    bytes: u64,
    latency: Histogram<u64>,
}

impl<'a> Meter<'a> {
    fn new(plan: &'a Plan) -> Self {
        let now = Instant::now();
        Self {
            plan,
            opens: now + plan.warmup,
            closes: now + plan.warmup + plan.window,
            open: None,
            messages: 0,
            bytes: 0,
            latency: Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("valid bounds"),
        }
    }

    /// Opens the window when it is time; false when it has closed.
    fn running(&mut self, now: Instant) -> bool {
        if self.open.is_none() && now >= self.opens {
            self.open = Some((now, self.plan.server.and_then(usage::usage)));
        }
        now < self.closes
    }

    fn message(&mut self, latency: Option<Duration>) {
        if self.open.is_some() {
            self.messages += 1;
            if let Some(latency) = latency {
                self.latency.saturating_record(latency.as_nanos() as u64);
            }
        }
    }

    fn moved(&mut self, bytes: u64) {
        if self.open.is_some() {
            self.bytes += bytes;
        }
    }

    /// The result; `more` goes into it as it is.
    fn finish(self, errors: u64, more: &str) -> String {
        let now = Instant::now();
        let (since, before) = self.open.unwrap_or((now, None));
        let seconds = (now - since).as_secs_f64().max(1e-9);
        let after = self.plan.server.and_then(usage::usage);
        let (cpu_ns, switches) = match (before, after) {
            (Some(before), Some(after)) => (after.cpu_ns - before.cpu_ns, after.switches - before.switches),
            _ => (0, 0),
        };
        let (rss, peak) = self.plan.server.and_then(usage::memory).unwrap_or_default();
        let quantile = |share| self.latency.value_at_quantile(share) as f64 / 1e3;
        format!(
            "{{\"seconds\": {seconds:.4}, \"messages\": {}, \"bytes\": {}, \"messages_per_s\": {:.1}, \
             \"bytes_per_s\": {:.0}, \"p50_us\": {:.3}, \"p99_us\": {:.3}, \"p999_us\": {:.3}, \"max_us\": {:.3}, \
             \"errors\": {errors}, \"server_cpu_ns\": {cpu_ns}, \"server_switches\": {switches}, \
             \"server_rss\": {rss}, \"server_peak_rss\": {peak}{more}}}",
            self.messages,
            self.bytes,
            self.messages as f64 / seconds,
            self.bytes as f64 / seconds,
            quantile(0.5),
            quantile(0.99),
            quantile(0.999),
            self.latency.max() as f64 / 1e3,
        )
    }
}

/// Opens `count` connections, at most 128 on their way at a time, and registers them under their numbers.
fn connect_all(plan: &Plan, poll: &mut Poll, count: usize) -> io::Result<Vec<Flow>> {
    let end = Instant::now() + PATIENCE;
    let mut events = Events::with_capacity(1024);
    let mut flows: Vec<Flow> = Vec::with_capacity(count);
    let mut waiting = 0;
    let mut up = vec![false; count];
    while flows.len() < count || waiting > 0 {
        while flows.len() < count && waiting < 128 {
            let mut flow = Flow::connect(plan, flows.len())?;
            poll.registry().register(&mut flow.stream, Token(flows.len()), BOTH)?;
            flows.push(flow);
            waiting += 1;
        }
        poll.poll(&mut events, Some(Duration::from_millis(100)))?;
        for event in &events {
            let Token(index) = event.token();
            if !up[index] && flows[index].established()? {
                up[index] = true;
                waiting -= 1;
            }
        }
        if Instant::now() > end {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("{waiting} connections are not established"),
            ));
        }
    }
    Ok(flows)
}

/// Echoes in a closed loop: `pipeline` messages on their way for each connection. With `slow` more connections that send
/// as fast as the socket takes it but read a sip every 10 ms.
fn closed_loop(plan: &Plan, slow: usize) -> io::Result<String> {
    let pattern = Pattern::new();
    let mut poll = Poll::new()?;
    let mut events = Events::with_capacity(1024);
    let mut buffer = vec![0; 256 * 1024];
    let fast = plan.connections;
    let mut flows = connect_all(plan, &mut poll, fast + slow)?;
    let mut starts: Vec<VecDeque<Instant>> = vec![VecDeque::with_capacity(plan.pipeline); fast];
    for flow in &flows[fast..] {
        socket2::SockRef::from(&flow.stream).set_recv_buffer_size(16 * 1024)?;
    }
    let size = plan.size as u64;
    let depth = plan.pipeline as u64;
    let mut meter = Meter::new(plan);
    let mut errors = 0_u64;
    let mut dead = vec![false; flows.len()];
    let mut served = vec![false; fast];
    let start = Instant::now();
    for (flow, starts) in flows.iter_mut().zip(&mut starts) {
        starts.extend(std::iter::repeat_n(start, plan.pipeline));
        flow.send_up_to(&pattern, depth * size)?;
    }
    let mut sip_at = start;
    loop {
        let now = Instant::now();
        if !meter.running(now) {
            break;
        }
        let wait = if slow > 0 { sip_at.saturating_duration_since(now) } else { Duration::from_millis(10) };
        poll.poll(&mut events, Some(wait))?;
        for event in &events {
            let Token(index) = event.token();
            if dead[index] || index >= fast {
                continue;
            }
            let flow = &mut flows[index];
            let before = flow.received;
            let mut go = || -> io::Result<()> {
                while flow.read_once(&pattern, &mut buffer)? {}
                // All that came back leaves room for as much.
                let done = flow.received / size;
                let now = Instant::now();
                for _ in before / size..done {
                    let begun = starts[index].pop_front().expect("a reply follows its message");
                    meter.message(Some(now - begun));
                    served[index] |= meter.open.is_some();
                    starts[index].push_back(now);
                }
                meter.moved(flow.received - before);
                flow.send_up_to(&pattern, (done + depth) * size)?;
                Ok(())
            };
            if let Err(error) = go() {
                complain(&mut errors, &error);
                dead[index] = true;
            }
        }
        if slow > 0 && Instant::now() >= sip_at {
            sip_at = Instant::now() + SIP_EVERY;
            for (flow, dead) in flows[fast..].iter_mut().zip(&mut dead[fast..]) {
                if *dead {
                    continue;
                }
                let sip = flow
                    .read_once(&pattern, &mut buffer[..SIP])
                    .and_then(|_| flow.send_up_to(&pattern, flow.received + SLOW_OUTSTANDING));
                if let Err(error) = sip {
                    complain(&mut errors, &error);
                    *dead = true;
                }
            }
        }
    }
    let lost = dead.iter().filter(|dead| **dead).count();
    let unserved = served.iter().filter(|served| !**served).count();
    let mut more = format!(", \"lost_connections\": {lost}, \"unserved_connections\": {unserved}");
    if slow > 0 {
        let sent: u64 = flows[fast..].iter().map(|flow| flow.sent).sum();
        let sipped: u64 = flows[fast..].iter().map(|flow| flow.received).sum();
        more += &format!(", \"slow_sent\": {sent}, \"slow_received_in_time\": {sipped}");
    }
    let mut result = meter.finish(errors, &more);
    if slow > 0 {
        // Whatever was sent has to come back once it is read.
        let missing = drain(&mut poll, &mut flows, fast, &mut dead, &pattern, &mut buffer)?;
        result.truncate(result.len() - 1);
        result += &format!(", \"slow_missing_bytes\": {missing}}}");
    }
    Ok(result)
}

/// Reads everything that slow readers are owed; returns how many bytes never came.
fn drain(
    poll: &mut Poll,
    flows: &mut [Flow],
    fast: usize,
    dead: &mut [bool],
    pattern: &Pattern,
    buffer: &mut [u8],
) -> io::Result<u64> {
    let mut events = Events::with_capacity(1024);
    let end = Instant::now() + PATIENCE;
    for flow in &flows[fast..] {
        socket2::SockRef::from(&flow.stream).set_recv_buffer_size(1 << 20)?;
    }
    loop {
        let mut missing = 0;
        for (index, flow) in flows.iter_mut().enumerate().skip(fast) {
            while !dead[index] && flow.received < flow.sent {
                match flow.read_once(pattern, buffer) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        complain(&mut 0, &error);
                        dead[index] = true;
                    }
                }
            }
            missing += flow.sent - flow.received;
        }
        if missing == 0 || Instant::now() > end {
            return Ok(missing);
        }
        poll.poll(&mut events, Some(Duration::from_millis(20)))?;
    }
}

fn complain(errors: &mut u64, error: &io::Error) {
    *errors += 1;
    if *errors <= 3 {
        eprintln!("{error}");
    }
}

pub fn echo(plan: &Plan) -> io::Result<String> {
    closed_loop(plan, 0)
}

pub fn slow(plan: &Plan) -> io::Result<String> {
    closed_loop(plan, plan.slow)
}

/// One way: sends as fast as the sockets take it, to a server that answers nothing. A "message" is 16 KiB.
pub fn stream(plan: &Plan) -> io::Result<String> {
    let pattern = Pattern::new();
    let mut poll = Poll::new()?;
    let mut events = Events::with_capacity(1024);
    let mut flows = connect_all(plan, &mut poll, plan.connections)?;
    let mut meter = Meter::new(plan);
    let mut errors = 0;
    let mut writable: Vec<bool> = vec![true; flows.len()];
    let mut sent_before: u64 = 0;
    let mut counted = false;
    loop {
        if !meter.running(Instant::now()) {
            break;
        }
        if !counted && meter.open.is_some() {
            counted = true;
            sent_before = flows.iter().map(|flow| flow.sent).sum();
        }
        let wait = if writable.contains(&true) { Duration::ZERO } else { Duration::from_millis(10) };
        poll.poll(&mut events, Some(wait))?;
        for event in &events {
            writable[event.token().0] |= event.is_writable();
        }
        for (flow, writable) in flows.iter_mut().zip(&mut writable).filter(|(_, writable)| **writable) {
            // A turn each, so that one connection does not keep the others waiting.
            match flow.send_up_to(&pattern, flow.sent + (1 << 20)) {
                Ok(more) => *writable = more,
                Err(error) => {
                    complain(&mut errors, &error);
                    *writable = false;
                }
            }
        }
    }
    meter.bytes = flows.iter().map(|flow| flow.sent).sum::<u64>() - sent_before;
    meter.messages = meter.bytes / (16 * 1024);
    Ok(meter.finish(errors, ""))
}

/// Connects, sends one message, reads the reply, closes; `connections` of them at a time.
pub fn churn(plan: &Plan) -> io::Result<String> {
    struct Turn {
        flow: Flow,
        begun: Instant,
    }
    let pattern = Pattern::new();
    let mut poll = Poll::new()?;
    let mut events = Events::with_capacity(1024);
    let mut buffer = vec![0; 64 * 1024];
    let mut meter = Meter::new(plan);
    let mut errors = 0;
    let mut number = 0;
    let mut turns: Vec<Option<Turn>> = (0..plan.connections).map(|_| None).collect();
    let size = plan.size as u64;
    while meter.running(Instant::now()) {
        for (slot, turn) in turns.iter_mut().enumerate().filter(|(_, turn)| turn.is_none()) {
            let begun = Instant::now();
            let mut flow = Flow::connect(plan, number)?;
            number += 1;
            poll.registry().register(&mut flow.stream, Token(slot), BOTH)?;
            *turn = Some(Turn { flow, begun });
        }
        poll.poll(&mut events, Some(Duration::from_millis(10)))?;
        for event in &events {
            let place = &mut turns[event.token().0];
            let Some(Turn { flow, begun }) = place else { continue };
            let mut go = || -> io::Result<bool> {
                if flow.sent < size && (event.is_writable() || event.is_error()) && flow.established()? {
                    flow.send_up_to(&pattern, size)?;
                }
                while flow.sent > 0 && event.is_readable() && flow.read_once(&pattern, &mut buffer)? {}
                Ok(flow.received == size)
            };
            match go() {
                Ok(false) => {}
                Ok(true) => {
                    meter.message(Some(begun.elapsed()));
                    meter.moved(size);
                    *place = None;
                }
                Err(error) => {
                    complain(&mut errors, &error);
                    *place = None;
                }
            }
        }
    }
    Ok(meter.finish(errors, &format!(", \"connections_made\": {number}")))
}

/// Opens connections, has one message echoed on each, says so, and holds them until standard input ends.
pub fn idle(plan: &Plan) -> io::Result<String> {
    let pattern = Pattern::new();
    let mut poll = Poll::new()?;
    let mut buffer = vec![0; 64 * 1024];
    let mut flows = connect_all(plan, &mut poll, plan.connections)?;
    let size = plan.size as u64;
    let end = Instant::now() + PATIENCE;
    let mut missing = flows.len();
    let mut events = Events::with_capacity(1024);
    // A few at a time: what idle connections cost is the question, not what a burst does.
    for first in (0..flows.len()).step_by(256) {
        let group = first..(first + 256).min(flows.len());
        for flow in &mut flows[group.clone()] {
            flow.send_up_to(&pattern, size)?;
        }
        while flows[group.clone()].iter().any(|flow| flow.received < size) && Instant::now() < end {
            poll.poll(&mut events, Some(Duration::from_millis(20)))?;
            for event in &events {
                let flow = &mut flows[event.token().0];
                if flow.sent > 0 && flow.received < size {
                    flow.read_once(&pattern, &mut buffer)?;
                }
            }
        }
        missing -= flows[group].iter().filter(|flow| flow.received == size).count();
    }
    println!("{{\"connected\": {}, \"unanswered\": {missing}}}", flows.len());
    let _ = io::stdin().read_to_end(&mut Vec::new());
    let lost = flows
        .iter_mut()
        .filter_map(|flow| flow.read_once(&pattern, &mut buffer).err())
        .inspect(|error| eprintln!("{error}"))
        .count();
    Ok(format!("{{\"lost\": {lost}}}"))
}
