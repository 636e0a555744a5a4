//! Guard mode: every buffer on pages of its own, which can be accessed only while somebody has it.
//!
//! ```text
//!   ┌─────────┬─────────┬─────────┬─────────┬─────────┬──
//!   │ no one  │ slack|buffer 0    │ no one  │ slack|buffer 1 ...
//!   └─────────┴─────────┴─────────┴─────────┴─────────┴──
//!                                 ▲ whoever goes one byte too far is caught here
//! ```
//!
//! A buffer that is no multiple of a page lies at the end of its pages, because overruns are commoner
//! than underruns (which are caught only if there is no slack).
//!
//! What the mode catches: late or wrong accesses to buffers of the arena, by this process (`SIGSEGV`) or
//! by the kernel through its own mappings (`EFAULT`). What it does not: payloads on the heap, and pages
//! that are registered with the kernel, so nothing is.

use std::fmt;
use std::io::{self, Write};

use super::arena::{Access, Arena, page};
use super::{BufferConfig, BufferError};

/// Where buffers lie in an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Offset of the first buffer, and from one to the next.
    pub(super) first: usize,
    pub(super) stride: usize,
    /// Bytes of the arena.
    pub(super) bytes: usize,
    /// Bytes of the pages of one buffer, which end where it ends; 0: nothing is guarded.
    pages: usize,
}

impl Layout {
    /// One buffer beside the other.
    fn plain(config: &BufferConfig) -> Self {
        Self { first: 0, stride: config.size as usize, bytes: config.arena_bytes(), pages: 0 }
    }

    /// A page that is never accessible before, between and behind all buffers.
    fn guarded(config: &BufferConfig, page: usize) -> Self {
        let size = config.size as usize;
        let pages = size.next_multiple_of(page);
        let buffers = config.count as usize + config.send_count as usize;
        let stride = pages + page;
        Self { first: page + (pages - size), stride, bytes: page + buffers * stride, pages }
    }

    #[inline]
    pub(super) fn is_guarded(&self) -> bool {
        self.pages > 0
    }

    /// Changes what may be done with a buffer's pages.
    ///
    /// # Panics
    /// When the system refuses: this mode is not to go on half on.
    #[cold]
    pub(super) fn set_access(&self, arena: &Arena, index: u32, size: u32, access: Access) {
        if let Err(error) = self.try_access(arena, index, size, access) {
            panic!("{}", too_many(&error));
        }
    }

    fn try_access(&self, arena: &Arena, index: u32, size: u32, access: Access) -> io::Result<()> {
        let end = self.first + index as usize * self.stride + size as usize;
        arena.protect(end - self.pages, self.pages, access)
    }
}

/// An arena for `config`, and where its buffers lie. In guard mode all of them are inaccessible.
pub(super) fn arena(config: &BufferConfig) -> Result<(Arena, Layout), BufferError> {
    let no_memory = |source| BufferError::Memory { bytes: config.arena_bytes(), source };
    if !config.is_guarded()? {
        let layout = Layout::plain(config);
        return Ok((Arena::map(layout.bytes).map_err(no_memory)?, layout));
    }
    let layout = Layout::guarded(config, page());
    let arena = match Arena::map_shut(layout.bytes) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            return Err(BufferError::Guard { why: "they need a Unix system".to_owned() });
        }
        mapped => mapped.map_err(no_memory)?,
    };
    let buffers = config.count + config.send_count;
    if let Some(most) = most_mappings()
        && u64::from(buffers) * 2 >= most
    {
        let why = format!("{REMEDY} (it is {most} now, for {buffers} buffers)");
        return Err(BufferError::Guard { why });
    }
    // As many mappings as there will be when all buffers are in use: whether the process has so many left is
    // found out now, not in the middle of the work.
    for access in [Access::ReadWrite, Access::Nothing] {
        for index in 0..buffers {
            layout
                .try_access(&arena, index, config.size, access)
                .map_err(|error| BufferError::Guard { why: too_many(&error) })?;
        }
    }
    Ok((arena, layout))
}

/// Whether guard mode is asked for, by the configuration or by the variable's value.
pub(super) fn is_on(asked: bool, variable: &str) -> Result<bool, BufferError> {
    match variable {
        "" | "0" => Ok(asked),
        "1" => Ok(true),
        other => Err(BufferError::Variable { value: other.to_owned() }),
    }
}

const REMEDY: &str = "each buffer takes two mappings of the process: raise the sysctl vm.max_map_count, or use \
                      fewer buffers or workers";

fn too_many(error: &io::Error) -> String {
    format!("the system refuses to change the access to a buffer's pages ({error}); {REMEDY}")
}

/// Mappings that a process may have; `None` where the system does not say. Not left to trying alone, because
/// whoever else needs a mapping meanwhile would be refused it.
fn most_mappings() -> Option<u64> {
    std::fs::read_to_string("/proc/sys/vm/max_map_count").ok()?.trim().parse().ok()
}

/// Ends the process because the kernel was stopped from touching memory that was not its own any more.
/// As final as the `SIGSEGV` that this process gets for the same: an error could be overlooked, and a
/// panic be caught.
#[cold]
pub(crate) fn violated(what: fmt::Arguments<'_>) -> ! {
    // Not a print macro: a test harness would keep that to itself. And if nobody takes the message, the
    // end says enough.
    let _ = writeln!(io::stderr(), "corelane: {what}");
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_read_strictly() {
        assert!(matches!(is_on(false, ""), Ok(false)));
        assert!(matches!(is_on(true, "0"), Ok(true)), "it does not turn off what the program asked for");
        assert!(matches!(is_on(false, "1"), Ok(true)));
        let text = is_on(false, "yes").expect_err("neither").to_string();
        assert!(text.contains("CORELANE_GUARD_BUFFERS is \"yes\""), "{text}");
    }
}
