//! Which kernel interface a runtime stands on.

use crate::config::{Backend, ConfigError};
use crate::driver::SetupError;

use super::StartError;

/// What the wish comes to, and why it is not the best that there is, if it is not. A fallback is also said
/// on standard error, once per process: whoever runs the program is to learn of it, whatever the program does with its
/// [`RuntimeInfo`](super::RuntimeInfo).
///
/// # Errors
/// [`StartError::Config`] for a variable that names no backend, [`StartError::Kernel`] for one that is not to
/// be had here.
pub(super) fn backend(asked: Backend) -> Result<(Backend, Option<String>), StartError> {
    let asked = match asked {
        Backend::Auto => match std::env::var_os(Backend::VARIABLE) {
            Some(value) if !value.is_empty() => variable(&value.to_string_lossy())?,
            _ => Backend::Auto,
        },
        asked => asked,
    };
    let (backend, fallback) = system(asked).map_err(StartError::Kernel)?;
    if let Some(line) = &fallback {
        static SAID: std::sync::Once = std::sync::Once::new();
        SAID.call_once(|| eprintln!("corelane: {line}"));
    }
    Ok((backend, fallback))
}

/// What the environment variable says. A value that is none is refused by the variable's name: whoever reads
/// the message may not know that there is one.
fn variable(value: &str) -> Result<Backend, StartError> {
    value.parse().map_err(|error| {
        StartError::Config(match error {
            ConfigError::Range { value, allowed, .. } => {
                ConfigError::Range { what: Backend::VARIABLE, value, allowed }
            }
            error => error,
        })
    })
}

#[cfg(target_os = "linux")]
fn system(asked: Backend) -> Result<(Backend, Option<String>), SetupError> {
    match asked {
        Backend::Iocp => Err(SetupError::Unavailable { backend: asked, needs: "Windows" }),
        Backend::IoUring | Backend::Epoll => Ok((asked, None)),
        Backend::Auto => match crate::driver::uring::probe() {
            Ok(()) => Ok((Backend::IoUring, None)),
            Err(cause) if cause.is_refusal() => Ok((
                Backend::Epoll,
                Some(format!(
                    "epoll is used instead of io_uring, at a higher cost per message: {cause}. (Setting {}=epoll, \
                     or asking for the backend in the program, says that this is intended.)",
                    Backend::VARIABLE,
                )),
            )),
            Err(error) => Err(error),
        },
    }
}

#[cfg(windows)]
fn system(asked: Backend) -> Result<(Backend, Option<String>), SetupError> {
    match asked {
        Backend::Auto | Backend::Iocp => Ok((Backend::Iocp, None)),
        Backend::IoUring | Backend::Epoll => Err(SetupError::Unavailable { backend: asked, needs: "Linux" }),
    }
}
