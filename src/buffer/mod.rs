//! The buffer room: memory that the kernel may know.
//!
//! One [`Arena`](arena::Arena) per worker is mapped once and cut into equal buffers by the
//! [`Pool`]. A buffer is in exactly one hand at any time:
//!
//! ```text
//!            lend                 lease (data arrived)
//!   Free ───────────► Kernel ───────────────────────────► Leased(n)
//!    ▲                  │ take back (cancelled, no data)      │ last Buf dropped
//!    └──────────────────┴─────────────────────────────────────┘
//! ```
//!
//! * **Free**: in the pool's free list; nobody may read or write it.
//! * **Kernel**: the kernel may write it at any moment; no reference to its bytes exists.
//! * **Leased(n)**: `n` [`Buf`]s read it; the kernel may read it too (a send), never write it.
//!
//! In guard mode ([`BufferConfig::guard`]) the pages of a buffer follow its state: no access while Free,
//! read and write while the kernel's, read while leased (and write once a lease has asked for it).
//!
//! A payload that waits to be sent is a [`Payload`]; the payloads of one connection form a
//! [`Chain`](chain::Chain), a linked list in one slab per worker, so that an idle connection holds
//! no memory and a busy one allocates none.
//!
//! What may not enter this room: sockets, connections, operations, time.

pub(crate) mod arena;
pub(crate) mod chain;
mod config;
// Some of what lends buffers to a kernel, and of guard mode, has no use but by Linux's drivers.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
pub(crate) mod guard;
mod lease;
mod payload;
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
mod pool;
#[cfg(test)]
mod tests;

pub use config::{BufferConfig, BufferError};
pub use lease::{Buf, BufMut};
pub use payload::{Detached, Payload};

pub(crate) use chain::{Chain, Chunks};
pub(crate) use pool::Pool;

/// The memory of one worker that a kernel may know: shared by the worker, which fills queues, and
/// its driver, which must be able to keep it alive longer than the worker (SAFETY invariant 2).
#[derive(Clone)]
pub(crate) struct Memory {
    pub(crate) pool: Pool,
    pub(crate) chunks: Chunks,
}

impl Memory {
    pub(crate) fn new(config: &BufferConfig) -> Result<Self, BufferError> {
        // One node for every buffer, so that sending what was received never makes the slab grow.
        let buffers = config.count as usize + config.send_count as usize;
        Ok(Self { pool: Pool::new(config)?, chunks: Chunks::with_capacity(buffers) })
    }

    /// An operation ended with `EFAULT`: it was given memory that the kernel must not access. Every pointer is a
    /// driver's own, so the operation came too late or went too far; guard mode is there to make that visible.
    #[cfg(target_os = "linux")]
    #[cold]
    pub(crate) fn fault(&self, what: std::fmt::Arguments<'_>) {
        if self.pool.is_guarded() {
            guard::violated(format_args!(
                "guard mode: the kernel was stopped from accessing memory that it no longer has ({what} ended with \
                 EFAULT)"
            ));
        }
    }

    /// Forgets one handle of each part on purpose: the memory then stays mapped until the process
    /// ends. The only answer when the kernel did not give operations back in time.
    pub(crate) fn leak(&self) {
        std::mem::forget(self.clone());
    }
}
