//! What people type: counts (`10k`), sizes (`8KiB`), times (`250ms`), rates (`20k/s`), addresses
//! and ranges of them, payloads with escapes, lists of cores.
//!
//! Every refusal says what was wrong and what would have been right; clap puts the flag's name in
//! front of it.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

use corelane::{Backend, WaitPolicy};

/// Splits `10.5k/s` into the number and what follows it.
fn number(text: &str) -> Result<(f64, &str), String> {
    if text.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit() || c == '.')) {
        return Err(format!("'{text}' is negative"));
    }
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let value: f64 =
        digits.replace('_', "").parse().map_err(|_| format!("'{text}' does not begin with a number"))?;
    Ok((value, unit.trim()))
}

/// A kernel interface, by the names that the library reads.
pub fn backend(text: &str) -> Result<Backend, String> {
    text.parse().map_err(|error: corelane::ConfigError| error.to_string())
}

/// How a worker waits, in the form that the library reads.
pub fn wait(text: &str) -> Result<WaitPolicy, String> {
    text.parse().map_err(|error: corelane::ConfigError| error.to_string())
}

/// A whole number with an optional `k`, `m` or `g` (thousand, million, milliard): `64`, `10k`, `1.5m`.
pub fn count(text: &str) -> Result<u64, String> {
    let (value, unit) = number(text)?;
    let factor = match unit {
        "" => 1.0,
        "k" | "K" => 1e3,
        "m" | "M" => 1e6,
        "g" | "G" => 1e9,
        _ => return Err(format!("unknown unit '{unit}': write a number, or one with k, m or g (10k)")),
    };
    whole(value * factor, text)
}

/// A [`count`] that is at least one.
pub fn positive(text: &str) -> Result<u64, String> {
    match count(text)? {
        0 => Err("must be at least 1".to_owned()),
        value => Ok(value),
    }
}

/// A [`positive`] count that fits 32 bits.
pub fn positive_u32(text: &str) -> Result<u32, String> {
    let value = positive(text)?;
    u32::try_from(value).map_err(|_| format!("{value} is more than {}", u32::MAX))
}

/// Bytes: `64`, `1500B`, `1kB` (1000), `8KiB` or `8Ki` (8192), `1MiB`.
pub fn bytes(text: &str) -> Result<u64, String> {
    let (value, unit) = number(text)?;
    let factor = match unit {
        "" | "B" => 1.0,
        "k" | "kB" | "KB" => 1e3,
        "m" | "M" | "MB" => 1e6,
        "Ki" | "KiB" | "K" => 1024.0,
        "Mi" | "MiB" => 1024.0 * 1024.0,
        "Gi" | "GiB" => 1024.0 * 1024.0 * 1024.0,
        _ => return Err(format!("unknown unit '{unit}': use B, kB, MB, KiB, MiB or GiB")),
    };
    whole(value * factor, text)
}

/// A size that is at least one byte and fits 32 bits.
pub fn bytes_u32(text: &str) -> Result<u32, String> {
    match bytes(text)? {
        0 => Err("must be at least 1".to_owned()),
        value => u32::try_from(value).map_err(|_| format!("{value} is more than {}", u32::MAX)),
    }
}

/// Rounds what must be a whole number; refuses `1.5` (but not `1.5k`).
fn whole(value: f64, text: &str) -> Result<u64, String> {
    if value.fract().abs() > 1e-6 {
        return Err(format!("'{text}' is not a whole number"));
    }
    if value > 1e15 {
        return Err(format!("'{text}' is too large"));
    }
    Ok(value.round() as u64)
}

/// A time with its unit: `250ms`, `5s`, `1.5s`, `100us`, `2m`, `1h`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (value, unit) = number(text)?;
    let seconds = match unit {
        "ns" => value / 1e9,
        "us" | "µs" | "μs" => value / 1e6,
        "ms" => value / 1e3,
        "s" => value,
        "m" | "min" => value * 60.0,
        "h" => value * 3600.0,
        "" if value == 0.0 => 0.0,
        "" => return Err(format!("'{text}' has no unit: write {text}s or {text}ms")),
        _ => return Err(format!("unknown unit '{unit}': use ns, us, ms, s, m or h")),
    };
    if seconds > 1e7 {
        return Err(format!("'{text}' is longer than 115 days"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// A [`duration`] longer than zero.
pub fn positive_duration(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("must be longer than zero".to_owned()),
        value => Ok(value),
    }
}

/// A [`duration`] between beats: at least a millisecond.
pub fn interval(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        value if value < Duration::from_millis(1) => Err("must be at least 1ms".to_owned()),
        value => Ok(value),
    }
}

/// Events per second: `20k/s`, `500/s`, or just `20k`; per minute: `30/m`.
pub fn rate(text: &str) -> Result<f64, String> {
    let (amount, per) = match text.split_once('/') {
        None => (text, 1.0),
        Some((amount, "s" | "sec")) => (amount, 1.0),
        Some((amount, "m" | "min")) => (amount, 60.0),
        Some((_, unit)) => return Err(format!("unknown rate '/{unit}': write it per second (20k/s)")),
    };
    let (value, unit) = number(amount)?;
    let factor = match unit {
        "" => 1.0,
        "k" | "K" => 1e3,
        "m" | "M" => 1e6,
        _ => return Err(format!("unknown unit '{unit}': write a number, or one with k or m (20k/s)")),
    };
    let rate = value * factor / per;
    if rate <= 0.0 {
        return Err("must be more than zero".to_owned());
    }
    if rate > 1e9 {
        return Err(format!("{text} is more than 1000 million per second"));
    }
    Ok(rate)
}

/// Size and number of buffers, as `8KiBx512`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// Bytes of one buffer.
    pub size: u32,
    /// Number of receive buffers.
    pub count: u32,
}

/// Parses `SIZExCOUNT`.
pub fn buffers(text: &str) -> Result<Buffers, String> {
    let (size, number) = text
        .rsplit_once('x')
        .ok_or_else(|| format!("'{text}' is not SIZExCOUNT: write 8KiBx512 for 512 buffers of 8 KiB"))?;
    let fit = |value: u64| u32::try_from(value).map_err(|_| format!("{value} is too large"));
    Ok(Buffers { size: fit(bytes(size)?)?, count: fit(count(number)?)? })
}

/// An address to listen on: `127.0.0.1:7000`, `[::]:7000`.
pub fn listen(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| format!("'{text}' is not an address and a port: write 127.0.0.1:7000 or [::]:7000"))
}

/// One address, or several whose last parts differ: `127.0.0.1:7000`, `127.0.0.1-8:7000`,
/// `[::1]:7000`, `localhost:7000` (resolved once, first answer).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Targets(pub Vec<SocketAddr>);

/// Parses one entry of `--target`.
pub fn targets(text: &str) -> Result<Targets, String> {
    let (host, port) =
        text.rsplit_once(':').ok_or_else(|| format!("'{text}' has no port: write {text}:7000"))?;
    let port: u16 = port.parse().map_err(|_| format!("'{port}' is not a port (1 to 65535)"))?;
    if port == 0 {
        return Err("port 0 cannot be connected to: name the port the server listens on".to_owned());
    }
    if let Ok(hosts) = addresses(host.trim_start_matches('[').trim_end_matches(']')) {
        return Ok(Targets(hosts.0.into_iter().map(|ip| SocketAddr::new(ip, port)).collect()));
    }
    let mut found = (host, port).to_socket_addrs().map_err(|error| {
        format!("'{host}' is neither an address, a range (127.0.0.1-8) nor a known name: {error}")
    })?;
    let first = found.next().ok_or_else(|| format!("'{host}' has no address"))?;
    Ok(Targets(vec![first]))
}

/// Local addresses to connect from: `127.0.0.2`, `127.0.0.2-9`, `::1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources(pub Vec<IpAddr>);

/// Parses one entry of `--source`; a range runs over the last part of an IPv4 address.
pub fn addresses(text: &str) -> Result<Sources, String> {
    let parse = |text: &str| {
        text.parse::<IpAddr>()
            .map_err(|_| format!("'{text}' is not an address: write 127.0.0.2, 127.0.0.2-9 or ::1"))
    };
    let Some((first, last)) = text.split_once('-') else {
        return Ok(Sources(vec![parse(text)?]));
    };
    let IpAddr::V4(first) = parse(first)? else {
        return Err(format!("'{text}': a range is for IPv4; list IPv6 addresses one by one"));
    };
    let [a, b, c, low] = first.octets();
    let high: u8 =
        last.parse().map_err(|_| format!("'{last}' is not the last part of an IPv4 address (0 to 255)"))?;
    if high < low {
        return Err(format!("'{text}' runs backwards: write {a}.{b}.{c}.{high}-{low}"));
    }
    Ok(Sources((low..=high).map(|d| IpAddr::from([a, b, c, d])).collect()))
}

/// Bytes with the escapes `\n`, `\r`, `\t`, `\0`, `\\` and `\xNN`.
pub fn payload(text: &str) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c != '\\' {
            out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
            continue;
        }
        match rest.next() {
            Some('n') => out.push(b'\n'),
            Some('r') => out.push(b'\r'),
            Some('t') => out.push(b'\t'),
            Some('0') => out.push(0),
            Some('\\') => out.push(b'\\'),
            Some('x') => {
                let digits: String = rest.by_ref().take(2).collect();
                let byte = u8::from_str_radix(&digits, 16)
                    .ok()
                    .filter(|_| digits.len() == 2)
                    .ok_or_else(|| format!("'\\x{digits}': \\x needs two hexadecimal digits (\\x0a)"))?;
                out.push(byte);
            }
            other => {
                let shown = other.map(String::from).unwrap_or_default();
                return Err(format!("unknown escape '\\{shown}': known are \\n \\r \\t \\0 \\\\ \\xNN"));
            }
        }
    }
    if out.is_empty() {
        return Err("must not be empty".to_owned());
    }
    Ok(out)
}

/// Shows bytes the way [`payload`] reads them.
pub fn escape(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for &byte in bytes {
        match byte {
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            b'\\' => out.push_str("\\\\"),
            b' '..=b'~' => out.push(byte.into()),
            _ => out.push_str(&format!("\\x{byte:02x}")),
        }
    }
    out
}

/// Cores, as `0`, `0,2` or `0-3`; also the format of `Cpus_allowed_list`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus(pub Vec<usize>);

/// Parses a list of cores.
pub fn cpus(text: &str) -> Result<Cpus, String> {
    let parse = |text: &str| {
        text.trim().parse::<usize>().map_err(|_| format!("'{text}' is not a core: write 0, 0,2 or 0-3"))
    };
    let mut list = Vec::new();
    for part in text.split(',') {
        match part.split_once('-') {
            None => list.push(parse(part)?),
            Some((first, last)) => {
                let (first, last) = (parse(first)?, parse(last)?);
                if last < first || last - first > 4096 {
                    return Err(format!("'{part}' is not a range of cores: write 0-3"));
                }
                list.extend(first..=last);
            }
        }
    }
    Ok(Cpus(list))
}

/// How a server, or a generator, is written: the same on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Tier {
    /// As callbacks (Handler)
    Handler,
    /// As async code, a task for each connection
    Async,
}

impl Tier {
    /// Its name, as it is given and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Handler => "handler",
            Self::Async => "async",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_take_k_m_g() {
        assert_eq!(count("64"), Ok(64));
        assert_eq!(count("10k"), Ok(10_000));
        assert_eq!(count("1.5m"), Ok(1_500_000));
        assert_eq!(count("50_000"), Ok(50_000));
        assert!(count("1.5").is_err());
        assert!(count("k").is_err());
        assert!(count("10q").expect_err("unit").contains("10k"));
        assert!(positive("0").is_err());
    }

    #[test]
    fn sizes_tell_thousand_and_1024_apart() {
        assert_eq!(bytes("64"), Ok(64));
        assert_eq!(bytes("8KiB"), Ok(8192));
        assert_eq!(bytes("1kB"), Ok(1000));
        assert_eq!(bytes("1MiB"), Ok(1 << 20));
        assert_eq!(buffers("8KiBx512"), Ok(Buffers { size: 8192, count: 512 }));
        assert_eq!(buffers("4096x1k"), Ok(Buffers { size: 4096, count: 1000 }));
        assert!(buffers("8KiB").expect_err("no count").contains("8KiBx512"));
    }

    #[test]
    fn times_need_a_unit() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("5s"), Ok(Duration::from_secs(5)));
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("100us"), Ok(Duration::from_micros(100)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        assert_eq!(duration("5").expect_err("no unit"), "'5' has no unit: write 5s or 5ms");
        assert!(positive_duration("0s").is_err());
    }

    #[test]
    fn rates_are_per_second_unless_said() {
        assert_eq!(rate("20k/s"), Ok(20_000.0));
        assert_eq!(rate("20k"), Ok(20_000.0));
        assert_eq!(rate("30/m"), Ok(0.5));
        assert!(rate("0").is_err());
        assert!(rate("5/day").is_err());
    }

    #[test]
    fn a_range_of_addresses_runs_over_the_last_part() {
        let Targets(list) = targets("127.0.0.1-3:7000").expect("range");
        assert_eq!(list.len(), 3);
        assert_eq!(list[2].to_string(), "127.0.0.3:7000");
        assert_eq!(targets("[::1]:7000").expect("v6").0[0].to_string(), "[::1]:7000");
        assert_eq!(addresses("127.0.0.2-9").expect("range").0.len(), 8);
        assert!(addresses("127.0.0.9-2").expect_err("backwards").contains("2-9"));
        assert!(targets("127.0.0.1").expect_err("no port").contains("no port"));
        assert!(targets("127.0.0.1:0").is_err());
        assert!(targets("127.0.0.1:99999").is_err());
        assert!(addresses("::1-3").is_err());
    }

    #[test]
    fn payloads_read_and_show_escapes() {
        assert_eq!(payload(r"ping\n"), Ok(b"ping\n".to_vec()));
        assert_eq!(payload(r"\x00\xff\\\t\r"), Ok(vec![0, 255, b'\\', b'\t', b'\r']));
        assert_eq!(payload("é"), Ok("é".as_bytes().to_vec()));
        assert!(payload(r"\q").expect_err("escape").contains("\\xNN"));
        assert!(payload(r"\x1").is_err());
        assert!(payload(r"a\").is_err());
        assert!(payload("").is_err());
        assert_eq!(escape(b"ping\n\x01"), r"ping\n\x01");
    }

    #[test]
    fn lists_of_cores() {
        assert_eq!(cpus("0"), Ok(Cpus(vec![0])));
        assert_eq!(cpus("0,2-4"), Ok(Cpus(vec![0, 2, 3, 4])));
        assert!(cpus("3-1").is_err());
        assert!(cpus("a").is_err());
    }
}
