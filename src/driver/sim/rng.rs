//! The one source of chance: small, seeded, the same on every machine.

/// SplitMix64: one addition and three mixing steps per number, any seed is good.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `0..n`; 0 for `n` = 0. The bias of the modulus does not matter here.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { self.next() % n }
    }

    /// A number from `low` to `high`, both included.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        if high <= low { low } else { low + self.below((high - low).saturating_add(1)) }
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// True with the given probability. A probability of 0 draws nothing, so that a fault that is
    /// off leaves no mark in the sequence.
    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        if probability <= 0.0 {
            return false;
        }
        // 53 bits fill a double's mantissa exactly.
        ((self.next() >> 11) as f64) < probability * (1u64 << 53) as f64
    }
}

/// Spreads the bits of a number over the whole word.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_the_published_one() {
        // The first outputs of the reference implementation for seed 1234567.
        let mut rng = Rng::new(1_234_567);
        assert_eq!(rng.next(), 6_457_827_717_110_365_317);
        assert_eq!(rng.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn ranges_are_kept_and_reached() {
        let mut rng = Rng::new(1);
        let drawn: Vec<u64> = (0..200).map(|_| rng.between(3, 5)).collect();
        for n in 3..=5 {
            assert!(drawn.contains(&n));
        }
        assert!(drawn.iter().all(|n| (3..=5).contains(n)));
        assert_eq!(rng.between(7, 7), 7);
        assert_eq!(rng.below(0), 0);
    }

    #[test]
    fn probabilities_hold_at_their_ends() {
        let mut rng = Rng::new(2);
        assert!((0..100).all(|_| rng.chance(1.0)));
        assert!((0..100).all(|_| !rng.chance(0.0)));
        let heads = (0..10_000).filter(|_| rng.chance(0.25)).count();
        assert!((2_300..2_700).contains(&heads), "{heads}");
    }
}
