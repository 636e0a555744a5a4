//! Where io_uring is forbidden: `Backend::Auto` goes on with epoll and says so, and whoever insists on io_uring
//! is told why it is not to be had. The filters are real; each is that of a child process.
//!
//! The whole conformance suite under these filters: `ci/seccomp.sh`.
#![cfg(target_os = "linux")]

mod support;

use std::os::unix::process::CommandExt;
use std::process::Command;

use corelane::{Backend, Builder, Descriptors, Runtime, SetupError, StartError};
use support::*;

/// What a filter may answer, and what is then said of it.
const ANSWERS: [(&str, i32, &str); 2] =
    [("EPERM", libc::EPERM, "seccomp"), ("ENOSYS", libc::ENOSYS, "not implemented (ENOSYS)")];

/// Installs the filter that a child's role names.
fn forbid_all(role: &str) {
    let (_, errno, _) = ANSWERS.iter().find(|(name, ..)| role.starts_with(name)).expect("a known answer");
    forbid_io_uring(*errno);
}

/// Runs a test of this program again, with nothing (or `variable`) in the environment that chooses a backend;
/// returns what the child says, and what the library says on its standard error.
fn rerun_telling(name: &str, role: &str, variable: Option<&str>) -> (Vec<String>, Vec<String>) {
    let setting =
        variable.map_or("CORELANE_NONE=".to_owned(), |value| format!("{}={value}", Backend::VARIABLE));
    let both = "exec \"$0\" \"$@\" 2>&1";
    let wrap = ["env", "-u", Backend::VARIABLE, setting.as_str(), "sh", "-c", both];
    let mut child = rerun(name, role, &wrap);
    let (mut said, mut library) = (Vec::new(), Vec::new());
    loop {
        let line = child.line();
        if line == "child: end" {
            break;
        }
        if let Some(line) = line.strip_prefix("child: ") {
            said.push(line.to_owned());
        } else if let Some(line) = line.strip_prefix("corelane: ") {
            library.push(line.to_owned());
        }
    }
    child.ends();
    (said, library)
}

/// Starts an echo server, uses it, and says what it stands on.
fn tell_of(builder: Builder) {
    match builder.workers(2).listen(any_port()).start(|_| Hooks::echo()) {
        Ok(runtime) => {
            let info = runtime.info();
            say(&format!("backend {}", info.backend));
            say(&format!("fallback {}", info.fallback.as_deref().unwrap_or("none")));
            assert!(info.workers.iter().all(|worker| worker.descriptors == Descriptors::Fd));
            for n in 0..20 {
                exchange(connect(addr(&runtime)), &pattern(n, 100_000));
            }
            empties(&runtime);
            stop(runtime);
        }
        Err(error) => {
            let kind = match &error {
                StartError::Kernel(SetupError::Seccomp) => "seccomp",
                StartError::Kernel(SetupError::NotImplemented) => "not implemented (ENOSYS)",
                _ => "another",
            };
            assert!(error.is_preflight());
            say(&format!("error {kind}"));
            say(&error.to_string());
        }
    }
    say("end");
}

#[test]
fn auto_goes_on_with_epoll_and_says_why_once() {
    const NAME: &str = "auto_goes_on_with_epoll_and_says_why_once";
    if let Some(role) = role() {
        forbid_all(&role);
        return tell_of(Runtime::builder());
    }
    for (answer, _, cause) in ANSWERS {
        // Asked for by nobody, by the variable, and by an empty variable.
        for variable in [None, Some("auto"), Some("")] {
            let (said, library) = rerun_telling(NAME, answer, variable);
            assert_eq!(said[0], "backend epoll", "{said:?}");
            let why = said[1].strip_prefix("fallback ").expect("the second line");
            let words = ["epoll is used instead of io_uring", cause, answer, "io_uring_setup", "profile"];
            for word in words.into_iter().chain(["CORELANE_BACKEND=epoll"]) {
                assert!(why.contains(word), "{word} is missing: {why}");
            }
            assert_eq!(library, [why], "one line on standard error, the same");
        }
    }
}

/// A profile may allow a ring to be made and forbid what it is for: that is seen before anybody is served.
#[test]
fn a_filter_that_forbids_a_part_of_io_uring_is_seen_at_the_start() {
    const NAME: &str = "a_filter_that_forbids_a_part_of_io_uring_is_seen_at_the_start";
    let calls = [("enter", libc::SYS_io_uring_enter), ("register", libc::SYS_io_uring_register)];
    if let Some(role) = role() {
        let (_, call) = calls.iter().find(|(name, _)| role.contains(name)).expect("a known call");
        let (_, errno, _) = ANSWERS.iter().find(|(name, ..)| role.starts_with(name)).expect("a known answer");
        support::forbid(*call, *call, *errno);
        let asked = if role.ends_with("asked") { Backend::IoUring } else { Backend::Auto };
        return tell_of(Runtime::builder().backend(asked));
    }
    for (answer, ..) in ANSWERS {
        for (call, _) in calls {
            let (said, library) = rerun_telling(NAME, &format!("{answer} {call}"), None);
            assert_eq!(said[0], "backend epoll", "{answer} for {call}: {said:?}");
            assert!(library.len() == 1 && library[0].contains("a seccomp filter forbids"), "{library:?}");
            let (said, _) = rerun_telling(NAME, &format!("{answer} {call} asked"), None);
            assert_eq!(said[0], "error seccomp", "{answer} for {call}: {said:?}");
            assert!(said[1].contains("profile") && said[1].contains("backend auto or epoll"), "{said:?}");
        }
    }
}

#[test]
fn who_insists_on_io_uring_is_told_why_it_is_not_to_be_had() {
    const NAME: &str = "who_insists_on_io_uring_is_told_why_it_is_not_to_be_had";
    if let Some(role) = role() {
        forbid_all(&role);
        let asked = if role.ends_with("asked") { Backend::IoUring } else { Backend::Auto };
        return tell_of(Runtime::builder().backend(asked));
    }
    for (answer, _, cause) in ANSWERS {
        let asked = rerun_telling(NAME, &format!("{answer} asked"), None);
        let by_variable = rerun_telling(NAME, answer, Some("io_uring"));
        for (said, library) in [asked, by_variable] {
            assert_eq!(said[0], format!("error {cause}"), "{said:?}");
            for word in [answer, "io_uring_setup, io_uring_enter and io_uring_register"] {
                assert!(said[1].contains(word), "{word} is missing: {}", said[1]);
            }
            assert_eq!(library, [""; 0], "an error is enough");
        }
    }
}

#[test]
fn who_asks_for_epoll_gets_it_without_a_word() {
    const NAME: &str = "who_asks_for_epoll_gets_it_without_a_word";
    if let Some(role) = role() {
        if role != "no filter" {
            forbid_all(&role);
        }
        let asked = if role == "ENOSYS" { Backend::Auto } else { Backend::Epoll };
        return tell_of(Runtime::builder().backend(asked));
    }
    for (role, variable) in [("no filter", None), ("EPERM", None), ("ENOSYS", Some("epoll"))] {
        let (said, library) = rerun_telling(NAME, role, variable);
        assert_eq!(said, ["backend epoll", "fallback none"]);
        assert_eq!(library, [""; 0], "it is what was asked for");
    }
}

/// The sysctl cannot be set for one process, so only what is made of it is looked at.
#[test]
fn refusals_of_a_whole_interface_are_told_from_what_can_be_raised() {
    for value in ["1", "2"] {
        let error = SetupError::Sysctl { value: value.to_owned() };
        assert!(error.is_refusal());
        let text = error.to_string();
        for word in [&format!("kernel.io_uring_disabled = {value}"), "sysctl kernel.io_uring_disabled=0"] {
            assert!(text.contains(word), "{word} is missing: {text}");
        }
    }
    assert!(SetupError::Seccomp.is_refusal() && SetupError::NotImplemented.is_refusal());
    assert!(!SetupError::Limit { what: "RLIMIT_NOFILE".to_owned() }.is_refusal());
}

/// Becomes the program that `CORELANE_RUN` names, with its arguments, under the filter that `CORELANE_ANSWER`
/// names: how `ci/seccomp.sh` runs a test program where io_uring is forbidden.
#[test]
#[ignore = "a wrapper for ci/seccomp.sh"]
fn run_under_a_filter() {
    let run = std::env::var("CORELANE_RUN").expect("CORELANE_RUN: a program and its arguments");
    let mut words = run.split_whitespace();
    let program = words.next().expect("CORELANE_RUN: a program");
    forbid_all(&std::env::var("CORELANE_ANSWER").expect("CORELANE_ANSWER: EPERM or ENOSYS"));
    panic!("{program}: {}", Command::new(program).args(words).exec());
}
