//! Bytes that tell where they belong.

/// `len` bytes that differ by seed and by place: a shift, a loss, a repetition or a mix-up shows.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.extend_from_slice(&x.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Compares long byte strings without printing them.
pub fn same(got: &[u8], wanted: &[u8], what: &str) {
    let differs = got.iter().zip(wanted).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{what}: first difference at this byte of {}", wanted.len());
    assert_eq!(got.len(), wanted.len(), "{what}: length");
}

/// `got` may stop early, but is right as far as it goes.
pub fn prefix(got: &[u8], of: &[u8], what: &str) {
    assert!(got.len() <= of.len(), "{what}: {} bytes of {}", got.len(), of.len());
    same(got, &of[..got.len()], what);
}
