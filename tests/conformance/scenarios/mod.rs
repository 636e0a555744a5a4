//! The scenarios, by topic. What each guards, and where it may end otherwise, is in the list in `main.rs`;
//! the comments here say where a scenario comes from and why it is played as it is.

pub mod accept;
pub mod address;
pub mod cancel;
pub mod connect;
pub mod fairness;
pub mod half_close;
pub mod mailbox;
pub mod pause;
pub mod pressure;
pub mod reset;
pub mod reuse;
pub mod shutdown;
pub mod stream;
pub mod time;
pub mod waiting;
