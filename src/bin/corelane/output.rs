//! Where words and results go. What is said on standard error is best effort: a reader that went
//! away, or a full disk, is no reason to end a server or a measurement. A result that cannot be
//! written is a failure.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::Failure;

/// Says a line on standard error, if that can be.
macro_rules! say {
    ($($arg:tt)*) => { $crate::output::say_line(format_args!($($arg)*)) };
}
pub(crate) use say;

/// The function behind [`say!`].
pub fn say_line(line: fmt::Arguments<'_>) {
    // One write, so that lines of several threads and processes do not mix.
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// Writes what the program was called for to standard output.
///
/// # Errors
/// [`Failure`] with the cause.
pub fn print(text: &[u8]) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text)
        .and_then(|()| out.flush())
        .map_err(|error| Failure::run(format!("cannot write to standard output: {error}")))
}

/// Where a document goes.
pub enum Sink {
    /// Standard output.
    Stdout,
    /// A file, open already.
    File(File, PathBuf),
}

impl Sink {
    /// Opens it before the work begins, so that a path that cannot be written is noticed at once.
    ///
    /// # Errors
    /// [`Failure`] naming the file.
    pub fn open(flag: &str, path: &Path) -> Result<Self, Failure> {
        if path == Path::new("-") {
            return Ok(Self::Stdout);
        }
        let file = File::create(path)
            .map_err(|error| Failure::usage(format!("{flag}: cannot write {}: {error}", path.display())))?;
        Ok(Self::File(file, path.to_owned()))
    }

    /// Writes the document.
    ///
    /// # Errors
    /// [`Failure`] naming the file.
    pub fn write(self, document: &impl Serialize) -> Result<(), Failure> {
        let mut text = serde_json::to_vec_pretty(document)
            .map_err(|error| Failure::run(format!("the result cannot be written as JSON: {error}")))?;
        text.push(b'\n');
        match self {
            Self::Stdout => print(&text),
            Self::File(mut file, path) => file
                .write_all(&text)
                .map_err(|error| Failure::run(format!("cannot write {}: {error}", path.display()))),
        }
    }
}

/// Gives a result to people and to programs: the table to standard output, or to standard error
/// if the document goes to standard output. Neither waits for the other to go well.
///
/// # Errors
/// [`Failure`] when one could not be written.
pub fn publish(table: &str, sink: Option<Sink>, document: &impl Serialize) -> Result<(), Failure> {
    let printed = if let Some(Sink::Stdout) = sink {
        say!("{}", table.trim_end_matches('\n'));
        Ok(())
    } else {
        print(table.as_bytes())
    };
    let written = sink.map_or(Ok(()), |sink| sink.write(document));
    if let (Err(failure), Err(_)) = (&printed, &written) {
        say!("error: {failure}");
    }
    written.and(printed)
}
