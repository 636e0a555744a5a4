//! What to do, fixed before the first connection: addresses, schedule, bytes; and whether this
//! machine can do it at all.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use corelane::ConnectConfig;

use crate::proc;
use crate::show;

/// Everything a worker needs to know. Shared, never changed.
#[derive(Debug)]
pub struct Plan {
    /// Where to, used in turn.
    pub targets: Vec<SocketAddr>,
    /// Where from, used in turn once all targets had their turn; empty: the kernel's choice.
    pub sources: Vec<IpAddr>,
    /// Connections to make.
    pub connections: u32,
    /// Connections begun per second.
    pub ramp_per_s: f64,
    /// How long a handshake may take.
    pub connect_timeout: Duration,
    /// How long a reply may take.
    pub timeout: Duration,
    /// Excluded time before the window.
    pub warmup: Duration,
    /// The measured window.
    pub duration: Duration,
    /// When messages are sent.
    pub traffic: Traffic,
    /// What is sent and expected.
    pub content: Content,
}

/// When messages are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Traffic {
    /// Each connection keeps `pipeline` messages outstanding: the next is sent when a reply came.
    Closed {
        /// Messages outstanding per connection.
        pipeline: u32,
    },
    /// By the clock, whatever the server does.
    Open {
        /// When each connection is due.
        schedule: Schedule,
        /// What happens when a message is due while `depth` earlier ones wait for their replies.
        overlap: Overlap,
        /// Messages outstanding per connection.
        depth: u32,
    },
}

impl Traffic {
    /// Most messages that a connection may have outstanding.
    pub fn depth(&self) -> u32 {
        match *self {
            Self::Closed { pipeline } => pipeline,
            Self::Open { depth, .. } => depth,
        }
    }
}

/// What happens to a message that is due before the connection may send again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Overlap {
    /// It is not sent, and counted as missed.
    Skip,
    /// It is sent when the replies have come; its latency counts from when it was due.
    Queue,
}

/// How the connections' schedules lie to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Phase {
    /// Evenly over the interval: a steady stream.
    Spread,
    /// All at the same moment: the worst case.
    Aligned,
}

/// The open-loop schedule: connection `i` is due at `phase(i) + round * interval` after the start.
///
/// Kept in 1/1024 ns, so that a rate that is no whole number of nanoseconds does not drift.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    interval: u64,
    gap: u64,
}

/// Parts of a nanosecond in a [`Schedule`].
const FRACTION_BITS: u32 = 10;

impl Schedule {
    /// Every connection each `seconds`.
    pub fn new(seconds: f64, connections: u32, phase: Phase) -> Self {
        let interval = ((seconds * 1e9 * f64::from(1 << FRACTION_BITS)).round() as u64).max(1);
        let gap = match phase {
            Phase::Spread => interval / u64::from(connections.max(1)),
            Phase::Aligned => 0,
        };
        Self { interval, gap }
    }

    /// When connection `index` is due for the time `round` (from 0), after the start.
    #[inline]
    pub fn due(&self, index: u32, round: u64) -> Duration {
        Duration::from_nanos((self.interval * round + self.gap * u64::from(index)) >> FRACTION_BITS)
    }

    /// Time between two messages of one connection.
    pub fn interval(&self) -> Duration {
        self.due(0, 1)
    }

    /// Delay beyond which this program counts a message as sent late by its own fault.
    pub fn tolerance(&self) -> Duration {
        (self.interval() / 10).max(Duration::from_millis(10))
    }
}

/// The bytes of a message and of its reply.
#[derive(Clone, Copy, Debug)]
pub enum Content {
    /// A piece of a random block, at a place that depends on the connection and the message, so
    /// that a reply that belongs elsewhere, or is shifted, is noticed. The reply is the same bytes.
    Pattern {
        /// The random block: [`PLACES`] bytes longer than a message.
        block: &'static [u8],
        /// Bytes of a message.
        size: usize,
    },
    /// Always the same.
    Fixed {
        /// What is sent.
        request: &'static [u8],
        /// What must come back.
        reply: &'static [u8],
    },
}

/// Places in the block where a message may begin: a power of two.
const PLACES: usize = 1 << 16;

impl Content {
    /// Random messages of `size` bytes. The block lives as long as the process (leaked once), so
    /// that sending a message neither copies nor allocates.
    pub fn pattern(size: usize) -> Self {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let block: Vec<u8> = (0..size + PLACES)
            .map(|_| {
                // xorshift64*: no need for more than looking random.
                state ^= state >> 12;
                state ^= state << 25;
                state ^= state >> 27;
                (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 56) as u8
            })
            .collect();
        Self::Pattern { block: block.leak(), size }
    }

    /// The same bytes every time.
    pub fn fixed(request: Vec<u8>, reply: Vec<u8>) -> Self {
        Self::Fixed { request: request.leak(), reply: reply.leak() }
    }

    #[inline]
    fn place(index: u32, sequence: u32) -> usize {
        let mixed = index.wrapping_mul(0x9e37_79b1) ^ sequence.wrapping_mul(0x85eb_ca77);
        ((mixed ^ (mixed >> 15)) as usize) & (PLACES - 1)
    }

    /// What connection `index` sends as its message number `sequence`.
    #[inline]
    pub fn request(&self, index: u32, sequence: u32) -> &'static [u8] {
        match *self {
            Self::Pattern { block, size } => {
                let place = Self::place(index, sequence);
                &block[place..place + size]
            }
            Self::Fixed { request, .. } => request,
        }
    }

    /// What must come back.
    #[inline]
    pub fn reply(&self, index: u32, sequence: u32) -> &'static [u8] {
        match *self {
            Self::Pattern { .. } => self.request(index, sequence),
            Self::Fixed { reply, .. } => reply,
        }
    }

    /// Bytes of a message and of a reply.
    pub fn sizes(&self) -> (usize, usize) {
        match *self {
            Self::Pattern { size, .. } => (size, size),
            Self::Fixed { request, reply } => (request.len(), reply.len()),
        }
    }
}

/// Connections to one destination from one source above which finding a free port becomes slow.
const EASY_PORTS: u64 = 8192;

impl Plan {
    /// Where connection `index` goes, and from where.
    pub fn connect(&self, index: u32) -> ConnectConfig {
        let index = index as usize;
        let mut config = ConnectConfig::new(self.targets[index % self.targets.len()]);
        if !self.sources.is_empty() {
            let turn = index / self.targets.len();
            config.source = Some(SocketAddr::new(self.sources[turn % self.sources.len()], 0));
        }
        config.timeout = self.connect_timeout;
        config
    }

    /// When connection `index` is begun, after the start.
    pub fn ramp(&self, index: u32) -> Duration {
        Duration::from_secs_f64(f64::from(index) / self.ramp_per_s)
    }

    /// Whether every source can reach every target.
    ///
    /// # Errors
    /// Why not, and what to do.
    pub fn check_families(&self) -> Result<(), String> {
        for source in &self.sources {
            for target in &self.targets {
                if source.is_ipv4() != target.is_ipv4() {
                    return Err(format!(
                        "--source {source} and --target {target} are not of one family: give sources of the target's family"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Whether this machine can make the connections. Returns advice.
    ///
    /// # Errors
    /// Why not, and what to do.
    pub fn preflight(&self) -> Result<Vec<String>, String> {
        for &source in &self.sources {
            if UdpSocket::bind((source, 0)).is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable) {
                return Err(format!("--source {source}: no interface of this machine has the address"));
            }
        }
        let mut advice = Vec::new();
        let Some(ports) = proc::local_ports() else {
            return Ok(advice);
        };
        let ports = u64::from(ports.end() - ports.start()) + 1;
        let paths = (self.targets.len() * self.sources.len().max(1)) as u64;
        let wanted = u64::from(self.connections);
        let needed = wanted.div_ceil(ports);
        if wanted > ports * paths {
            return Err(format!(
                "{} connections do not fit: {paths} pair(s) of source and target address have {} local ports each \
                 (net.ipv4.ip_local_port_range), together {}. Give at least {needed} pairs, as with \
                 --target {} or --source 127.0.0.2-{}, or widen the range with \
                 sysctl net.ipv4.ip_local_port_range='1024 65535'",
                show::count(wanted),
                show::count(ports),
                show::count(ports * paths),
                self.example_range(needed),
                needed + 1,
            ));
        }
        if wanted.div_ceil(paths) > EASY_PORTS {
            advice.push(format!(
                "{} connections per pair of source and target address: above some {} the kernel searches long for a \
                 free port, and the ramp measures that search. {} targets avoid it, as with --target {}",
                show::count(wanted.div_ceil(paths)),
                show::count(EASY_PORTS),
                wanted.div_ceil(EASY_PORTS),
                self.example_range(wanted.div_ceil(EASY_PORTS)),
            ));
        }
        Ok(advice)
    }

    fn example_range(&self, count: u64) -> String {
        match self.targets[0] {
            SocketAddr::V4(target) => {
                let [a, b, c, d] = target.ip().octets();
                let last = (u64::from(d) + count - 1).min(254);
                format!("{a}.{b}.{c}.{d}-{last}:{}", target.port())
            }
            SocketAddr::V6(target) => format!("{target},[another address]:{}", target.port()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(connections: u32, targets: &[&str], sources: &[&str]) -> Plan {
        Plan {
            targets: targets.iter().map(|text| text.parse().expect("address")).collect(),
            sources: sources.iter().map(|text| text.parse().expect("address")).collect(),
            connections,
            ramp_per_s: 1000.0,
            connect_timeout: Duration::from_secs(1),
            timeout: Duration::from_secs(1),
            warmup: Duration::ZERO,
            duration: Duration::from_secs(1),
            traffic: Traffic::Closed { pipeline: 1 },
            content: Content::pattern(64),
        }
    }

    #[test]
    fn the_schedule_neither_drifts_nor_bunches() {
        // 300,000 messages a second on 7 connections: no whole number of nanoseconds.
        let schedule = Schedule::new(7.0 / 300_000.0, 7, Phase::Spread);
        let hour = schedule.due(0, 300_000 * 3600 / 7).as_secs_f64();
        assert!((hour / 3600.0 - 1.0).abs() < 1e-4, "{hour}");
        let schedule = Schedule::new(5.0, 50_000, Phase::Spread);
        assert_eq!(schedule.due(0, 0), Duration::ZERO);
        let half = schedule.due(25_000, 2).as_secs_f64();
        assert!((half - 12.5).abs() < 1e-4, "{half}");
        let aligned = Schedule::new(5.0, 50_000, Phase::Aligned);
        assert_eq!(aligned.due(49_999, 1), Duration::from_secs(5));
        assert_eq!(aligned.tolerance(), Duration::from_millis(500));
    }

    #[test]
    fn messages_differ_between_connections_and_in_sequence() {
        let content = Content::pattern(64);
        assert_eq!(content.request(1, 1), content.reply(1, 1));
        assert_ne!(content.request(1, 1), content.request(1, 2));
        assert_ne!(content.request(1, 1), content.request(2, 1));
        assert_eq!(content.request(u32::MAX, u32::MAX).len(), 64);
        let content = Content::fixed(b"ping\n".to_vec(), b"pong\n".to_vec());
        assert_eq!(content.request(3, 4), b"ping\n");
        assert_eq!(content.reply(3, 4), b"pong\n");
    }

    #[test]
    fn targets_and_sources_are_combined_in_full() {
        let plan = plan(4, &["127.0.0.1:7", "127.0.0.2:7"], &["127.0.0.3", "127.0.0.4"]);
        let mut pairs: Vec<_> = (0..4)
            .map(|index| {
                let config = plan.connect(index);
                (config.target, config.source)
            })
            .collect();
        pairs.sort();
        pairs.dedup();
        assert_eq!(pairs.len(), 4);
        assert_eq!(plan.ramp(500), Duration::from_millis(500));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn preflight_refuses_what_the_ports_cannot_hold() {
        let refusal = plan(70_000, &["127.0.0.1:7000"], &[]).preflight().expect_err("too many");
        assert!(refusal.contains("70,000") && refusal.contains("--target 127.0.0.1-"), "{refusal}");
        let targets: Vec<String> = (1..=9).map(|last| format!("127.0.0.{last}:7000")).collect();
        let targets: Vec<&str> = targets.iter().map(String::as_str).collect();
        assert_eq!(plan(70_000, &targets, &[]).preflight(), Ok(vec![]));
        let advice = plan(10_000, &["127.0.0.1:7000"], &[]).preflight().expect("possible");
        assert!(advice[0].contains("127.0.0.1-2:7000"), "{advice:?}");
        let refusal = plan(1, &["[::1]:7000"], &["127.0.0.1"]).check_families().expect_err("family");
        assert!(refusal.contains("family"), "{refusal}");
    }
}
