//! What a scenario is, where it may end otherwise, and how it is played on one backend.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::bed::Bed;

/// A backend, with what is varied of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Column {
    /// io_uring with everything that the kernel has, in the ring's own descriptor table.
    Uring,
    /// io_uring with ordinary descriptors.
    UringFd,
    /// io_uring as Linux 5.19 has it.
    Uring519,
    /// io_uring with the least that the backend works with, and ordinary descriptors.
    UringLeast,
    /// What `Backend::Auto` comes to; for systems that forbid io_uring.
    #[cfg_attr(windows, allow(dead_code, reason = "it is played on Linux"))]
    Auto,
    Epoll,
    Iocp,
    /// The simulated kernel, with a few seeds.
    Sim,
    /// The simulated kernel with everything going wrong that a correct program does not notice.
    SimFaults,
}

impl Column {
    /// Those that the table shows, in its order: what `Auto` comes to is one of the others.
    pub const SHOWN: [(Column, &str); 8] = [
        (Column::Uring, "uring"),
        (Column::UringFd, "uring, fds"),
        (Column::Uring519, "uring 5.19"),
        (Column::UringLeast, "uring least"),
        (Column::Epoll, "epoll"),
        (Column::Iocp, "iocp"),
        (Column::Sim, "sim"),
        (Column::SimFaults, "sim + faults"),
    ];

    /// The seeds to play with; one, without meaning, on a real kernel.
    fn seeds(self) -> Range<u64> {
        let count = match self {
            Column::Sim => 5,
            Column::SimFaults => 3,
            _ => return 0..1,
        };
        let Ok(asked) = std::env::var("CORELANE_SIM_SEEDS") else { return 0..count };
        let number = |text: &str| text.trim().parse::<u64>().expect("CORELANE_SIM_SEEDS: N or A..B");
        match asked.split_once("..") {
            Some((from, to)) => number(from)..number(to),
            None => number(&asked)..number(&asked) + 1,
        }
    }
}

/// The simulated kernel's columns, for what holds for both.
pub const SIMS: &[Column] = &[Column::Sim, Column::SimFaults];
pub const IOCP: &[Column] = &[Column::Iocp];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It is played with another expectation.
    Differs,
    /// It cannot be played.
    NotApplicable,
}

/// Backends on which a scenario ends otherwise, and why that is right.
#[derive(Clone, Copy, Debug)]
pub struct Exception {
    pub kind: Kind,
    pub columns: &'static [Column],
    pub why: &'static str,
}

/// One behaviour that every backend has.
pub struct Scenario {
    pub topic: &'static str,
    pub name: &'static str,
    /// What it guards, in one line.
    pub guards: &'static str,
    pub play: fn(&Bed),
    pub exceptions: &'static [Exception],
}

impl Scenario {
    fn exception(&self, kind: Kind, column: Column) -> Option<&'static str> {
        let found = self.exceptions.iter().find(|e| e.kind == kind && e.columns.contains(&column));
        found.map(|exception| exception.why)
    }

    pub fn differs(&self, column: Column) -> Option<&'static str> {
        self.exception(Kind::Differs, column)
    }

    pub fn not_applicable(&self, column: Column) -> Option<&'static str> {
        self.exception(Kind::NotApplicable, column)
    }
}

/// Plays a scenario on a backend, with all its seeds.
pub fn play(column: Column, scenario: &Scenario) {
    if let Some(why) = scenario.not_applicable(column) {
        println!("not applicable: {why}");
        return;
    }
    for seed in column.seeds() {
        match Bed::open(column, scenario, seed) {
            Ok(bed) => {
                (scenario.play)(&bed);
                bed.close();
            }
            Err(why) => println!("skipped: {why}"),
        }
    }
}

/// What trying a backend came to: asked once per process and column.
pub fn once(column: Column, attempt: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    static TRIED: Mutex<Option<HashMap<Column, Result<(), String>>>> = Mutex::new(None);
    let mut tried = TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    tried.get_or_insert_default().entry(column).or_insert_with(attempt).clone()
}

/// Makes of one list: the list itself, and a test for every scenario on every backend.
macro_rules! conformance {
    ($($topic:ident {
        $($(#[doc = $guards:literal])+ $name:ident $([$($kind:ident($columns:expr, $why:literal)),+ $(,)?])?;)*
    })*) => {
        const LIST: &[Scenario] = &[$($(Scenario {
            topic: stringify!($topic),
            name: stringify!($name),
            guards: concat!($($guards),+),
            play: scenarios::$topic::$name,
            exceptions: &[$($(Exception { kind: Kind::$kind, columns: $columns, why: $why }),+)?],
        },)*)*];

        fn scenario(name: &str) -> &'static Scenario {
            LIST.iter().find(|scenario| scenario.name == name).expect("it is in the list")
        }

        #[cfg(target_os = "linux")]
        mod uring {
            $($(#[test] fn $name() { crate::play(crate::Column::Uring, crate::scenario(stringify!($name))); })*)*
        }
        #[cfg(target_os = "linux")]
        mod uring_fd {
            $($(#[test] fn $name() { crate::play(crate::Column::UringFd, crate::scenario(stringify!($name))); })*)*
        }
        #[cfg(target_os = "linux")]
        mod uring_5_19 {
            $($(#[test] fn $name() { crate::play(crate::Column::Uring519, crate::scenario(stringify!($name))); })*)*
        }
        #[cfg(target_os = "linux")]
        mod uring_least {
            $($(#[test] fn $name() { crate::play(crate::Column::UringLeast, crate::scenario(stringify!($name))); })*)*
        }
        #[cfg(target_os = "linux")]
        mod epoll {
            $($(#[test] fn $name() { crate::play(crate::Column::Epoll, crate::scenario(stringify!($name))); })*)*
        }
        #[cfg(target_os = "linux")]
        mod auto {
            $($(
                #[test]
                #[ignore = "the same as another column, but where io_uring is forbidden: see ci/seccomp.sh"]
                fn $name() { crate::play(crate::Column::Auto, crate::scenario(stringify!($name))); }
            )*)*
        }
        #[cfg(windows)]
        mod iocp {
            $($(#[test] fn $name() { crate::play(crate::Column::Iocp, crate::scenario(stringify!($name))); })*)*
        }
        mod sim {
            $($(#[test] fn $name() { crate::play(crate::Column::Sim, crate::scenario(stringify!($name))); })*)*
        }
        mod sim_faults {
            $($(#[test] fn $name() { crate::play(crate::Column::SimFaults, crate::scenario(stringify!($name))); })*)*
        }
    };
}
pub(crate) use conformance;
