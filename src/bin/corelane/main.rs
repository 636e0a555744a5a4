//! `corelane`: echo and heartbeat servers on the library, and a load generator that measures any
//! such server, this one or another.
//!
//! Built on the library's public API alone; one file or folder per subcommand.

mod bench;
mod load;
mod output;
mod proc;
mod serve;
mod show;
mod units;

use std::fmt;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use corelane::{Signals, StartError};

use crate::output::say;

/// What the exit code says.
pub mod exit {
    /// All went well.
    pub const OK: u8 = 0;
    /// It failed while running.
    pub const FAILURE: u8 = 1;
    /// It was called wrongly.
    pub const USAGE: u8 = 2;
    /// A `--fail-if` holds.
    pub const THRESHOLD: u8 = 3;
    /// This machine, as it is set up, cannot do what was asked.
    pub const PREFLIGHT: u8 = 4;
    /// The generator was at its own limit: the result is invalid.
    pub const SATURATED: u8 = 5;
    /// A signal cut it short.
    pub const INTERRUPTED: u8 = 130;

    /// Signals this close together are one: `timeout` signals its child, then the child's group.
    pub const ECHO: std::time::Duration = std::time::Duration::from_millis(200);
}

/// Completion-based network runtime: servers, load generator, benchmark
#[derive(Debug, Parser)]
#[command(name = "corelane", version, arg_required_else_help = true)]
#[command(after_help = "Examples:\n  \
    corelane bench                                 the main job: server and load, one table\n  \
    corelane serve heartbeat --listen 0.0.0.0:7000 a server that answers ping with pong\n  \
    corelane load heartbeat --target 127.0.0.1:7000 -c 5k --interval 1s\n\n\
    Exit codes: 0 ok, 1 failure, 2 usage, 3 threshold missed, 4 this machine cannot, 5 generator saturated, 130 interrupted")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs a server
    Serve(serve::Serve),
    /// Puts load on a server and measures its replies
    #[command(subcommand)]
    Load(load::Load),
    /// Runs the main job here, server and load, and prints one table
    Bench(bench::Bench),
}

/// Why there is no result.
#[derive(Debug)]
pub struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    /// It failed while running.
    pub fn run(message: impl Into<String>) -> Self {
        Self { code: exit::FAILURE, message: message.into() }
    }

    /// It was called wrongly.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { code: exit::USAGE, message: message.into() }
    }

    /// It failed as a child process did that was to do a part of it.
    pub fn of_child(code: Option<i32>, message: impl Into<String>) -> Self {
        match code {
            Some(code) if code == i32::from(exit::PREFLIGHT) => Self::preflight(message),
            _ => Self::run(message),
        }
    }

    /// What went wrong, and where.
    pub fn at(self, place: &str) -> Self {
        Self { message: format!("{place}: {}", self.message), ..self }
    }

    /// This machine cannot do it.
    pub fn preflight(message: impl Into<String>) -> Self {
        Self { code: exit::PREFLIGHT, message: message.into() }
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        let code = match &error {
            StartError::Config(_) => exit::USAGE,
            _ if error.is_preflight() => exit::PREFLIGHT,
            _ => exit::FAILURE,
        };
        Self { code, message: error.to_string() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

fn main() -> ExitCode {
    // Before any thread exists, so that none of them can be the one that a signal ends.
    let signals = match Signals::block() {
        Ok(signals) => signals,
        Err(error) => {
            say!("error: cannot take over the signals to stop: {error}");
            return ExitCode::from(exit::FAILURE);
        }
    };
    let done = match Cli::parse().command {
        Command::Serve(args) => serve::main(args, signals),
        Command::Load(args) => load::main(args, signals),
        Command::Bench(args) => bench::main(args, signals),
    };
    done.unwrap_or_else(|failure| {
        say!("error: {failure}");
        ExitCode::from(failure.code)
    })
}
