//! How numbers are shown: thousands apart, times and sizes in the unit that fits them.

/// `1234567` as `1,234,567`.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A rate per second: thousands apart, with decimals only where they say something.
pub fn rate(value: f64) -> String {
    if value >= 100.0 { count(value.round() as u64) } else { format!("{value:.1}") }
}

/// Nanoseconds as `850 ns`, `85.1 µs`, `2.31 ms`, `1.20 s`.
pub fn nanos(value: u64) -> String {
    let value = value as f64;
    match value {
        v if v < 1e3 => format!("{v:.0} ns"),
        v if v < 1e6 => scaled(v / 1e3, "µs"),
        v if v < 1e9 => scaled(v / 1e6, "ms"),
        v => scaled(v / 1e9, "s"),
    }
}

/// Three significant digits and a unit.
fn scaled(value: f64, unit: &str) -> String {
    match value {
        v if v < 10.0 => format!("{v:.2} {unit}"),
        v if v < 100.0 => format!("{v:.1} {unit}"),
        v => format!("{v:.0} {unit}"),
    }
}

/// Bytes as `512 B`, `8.00 KiB`, `12.3 MiB`.
pub fn bytes(value: u64) -> String {
    let value = value as f64;
    match value {
        v if v < 1024.0 => format!("{v:.0} B"),
        v if v < 1048576.0 => scaled(v / 1024.0, "KiB"),
        v if v < 1073741824.0 => scaled(v / 1048576.0, "MiB"),
        v => scaled(v / 1073741824.0, "GiB"),
    }
}

/// A share as a percentage that never rounds something to nothing, nor nearly all to all.
pub fn percent(share: f64) -> String {
    let value = share * 100.0;
    if value == 0.0 || value == 100.0 {
        format!("{value:.0}%")
    } else if value < 0.001 {
        "<0.001%".to_owned()
    } else if value > 99.99 && value < 100.0 {
        ">99.99%".to_owned()
    } else {
        format!("{value:.3}%").replace("00%", "%")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(rate(12.345), "12.3");
        assert_eq!(rate(9999.6), "10,000");
        assert_eq!(nanos(850), "850 ns");
        assert_eq!(nanos(85_100), "85.1 µs");
        assert_eq!(nanos(2_310_000), "2.31 ms");
        assert_eq!(nanos(1_200_000_000), "1.20 s");
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(8192), "8.00 KiB");
        assert_eq!(percent(0.0), "0%");
        assert_eq!(percent(1.0), "100%");
        assert_eq!(percent(0.001), "0.1%");
        assert_eq!(percent(0.000001), "<0.001%");
        assert_eq!(percent(0.99999), ">99.99%");
    }
}
