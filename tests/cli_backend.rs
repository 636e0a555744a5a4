//! `--backend`: which kernel interface the tool's commands stand on, who decides it, and what is said about it.
#![cfg(all(feature = "cli", target_os = "linux"))]

mod cli_support;

use std::os::unix::process::CommandExt;
use std::process::Command;

use cli_support::{Ended, Process, corelane, run};
use serde_json::Value;

const VARIABLE: &str = "CORELANE_BACKEND";

/// Every command that takes the flag.
const COMMANDS: [&[&str]; 4] =
    [&["serve", "echo", "--listen", "127.0.0.1:0"], &["load", "echo"], &["load", "heartbeat"], &["bench"]];

fn ended(command: &mut Command) -> Ended {
    Process::spawn(command).end()
}

#[track_caller]
fn refused(ended: &Ended, code: i32, parts: &[&str]) {
    assert_eq!(ended.code, Some(code), "{ended:?}");
    assert_eq!(ended.stdout, "", "nothing but results on standard output");
    for part in parts {
        assert!(ended.stderr.contains(part), "no '{part}' in {}", ended.stderr);
    }
}

/// A server that is started, and told at once to stop; the document that it leaves, and what it said.
fn served(change: impl FnOnce(&mut Command)) -> (Value, String) {
    let mut command = corelane(&["serve", "echo", "--listen", "127.0.0.1:0", "--report-json", "-"]);
    command.arg("--until-stdin-ends").env_remove(VARIABLE);
    change(&mut command);
    let mut server = Process::spawn(&mut command);
    let line = server.line();
    assert!(line.starts_with("listening on "), "{line}");
    drop(server.stdin.take());
    let ended = server.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    (serde_json::from_str(&ended.stdout).expect("a document"), ended.stderr)
}

#[track_caller]
fn used(document: &Value) -> &str {
    document["environment"]["backend"].as_str().expect("a name")
}

/// Makes io_uring's system calls fail with `EPERM` in the child, as a container's seccomp filter does.
fn forbid_io_uring(command: &mut Command) {
    fn install() -> std::io::Result<()> {
        const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
        const AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
        const ABOVE: u16 = 0x25; // BPF_JMP | BPF_JGT | BPF_K
        const RETURN: u16 = 0x06; // BPF_RET | BPF_K
        let rule = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let mut rules = [
            rule(LOAD, 0, 0, 0),
            rule(AT_LEAST, 0, 2, libc::SYS_io_uring_setup as u32),
            rule(ABOVE, 1, 0, libc::SYS_io_uring_register as u32),
            rule(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            rule(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: rules.len() as u16, filter: rules.as_mut_ptr() };
        // SAFETY: takes integers only.
        if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let mode = libc::SECCOMP_MODE_FILTER;
        // SAFETY: the program outlives the call, which copies it.
        if unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(())
    }
    // SAFETY: two system calls and nothing else: no lock, no memory of the heap.
    unsafe { command.pre_exec(install) };
}

#[test]
fn a_name_that_is_none_is_a_wrong_call_and_lists_those_that_are() {
    for command in COMMANDS {
        let ended = run(&[command, &["--backend", "kqueue"]].concat());
        refused(&ended, 2, &["--backend", "kqueue", "auto, io_uring, epoll or iocp"]);
    }
    let ended = ended(corelane(COMMANDS[0]).env(VARIABLE, "kqueue"));
    refused(&ended, 2, &[VARIABLE, "kqueue", "auto, io_uring, epoll or iocp"]);
}

#[test]
fn a_backend_of_another_system_is_refused_as_one_that_this_machine_cannot_have() {
    for command in COMMANDS {
        let ended = run(&[command, &["--backend", "iocp"]].concat());
        refused(&ended, 4, &["iocp", "Windows", "auto"]);
    }
}

#[test]
fn the_flag_decides_before_the_variable_and_auto_leaves_it_to_the_variable() {
    let (document, said) = served(|command| {
        command.env(VARIABLE, "iocp").args(["--backend", "io_uring"]);
    });
    assert_eq!(used(&document), "io_uring");
    assert!(said.contains("io_uring on kernel "), "{said}");
    let ended = ended(corelane(COMMANDS[0]).env(VARIABLE, "iocp").args(["--backend", "auto"]));
    refused(&ended, 4, &["iocp", "Windows"]);
    let (document, _) = served(|command| {
        command.env(VARIABLE, "");
    });
    assert_eq!(used(&document), "io_uring", "an empty variable says nothing");
}

#[test]
fn epoll_by_name_serves_and_loads_without_a_word_of_a_fallback() {
    let mut command = corelane(&["serve", "echo", "--listen", "127.0.0.1:0", "--report-json", "-"]);
    command.args(["--until-stdin-ends", "--backend", "epoll"]).env_remove(VARIABLE);
    let mut server = Process::spawn(&mut command);
    let line = server.line();
    let target = line.strip_prefix("listening on ").expect("ready");
    // The generator stands on epoll because the variable says so.
    let mut load =
        corelane(&["load", "echo", "--target", target, "-c", "8", "-d", "300ms", "--warmup", "0s"]);
    let load = ended(load.args(["--json", "-"]).env(VARIABLE, "epoll"));
    // 5: a machine too busy to say anything about the server; the document is whole all the same.
    assert!(matches!(load.code, Some(0 | 5)), "{load:?}");
    assert!(load.stderr.contains("on epoll"), "the table names it: {}", load.stderr);
    let result: Value = serde_json::from_str(&load.stdout).expect("a document");
    assert_eq!(used(&result), "epoll");
    assert!(result["window"]["replied"].as_u64().expect("a number") > 0, "{result}");
    assert_eq!(result["errors"]["server_total"], 0, "{result}");
    drop(server.stdin.take());
    let served = server.end();
    assert_eq!(served.code, Some(0), "{served:?}");
    let document: Value = serde_json::from_str(&served.stdout).expect("a document");
    assert_eq!(used(&document), "epoll");
    assert_eq!(document["environment"]["fallback"], Value::Null);
    assert_eq!(document["environment"]["workers"][0]["descriptors"], "fd");
    assert!(served.stderr.contains("epoll on kernel "), "{}", served.stderr);
    assert!(!served.stderr.contains("instead of io_uring"), "{}", served.stderr);
}

#[test]
fn a_fallback_is_said_once_and_is_in_the_document_and_a_name_forbids_it() {
    let (document, said) = served(forbid_io_uring);
    assert_eq!(used(&document), "epoll");
    let fallback = document["environment"]["fallback"].as_str().expect("why");
    assert!(fallback.contains("seccomp") && fallback.contains("instead of io_uring"), "{fallback}");
    assert_eq!(said.matches("instead of io_uring").count(), 1, "{said}");
    let mut command = corelane(COMMANDS[0]);
    command.args(["--backend", "io_uring"]).env_remove(VARIABLE);
    forbid_io_uring(&mut command);
    refused(&ended(&mut command), 4, &["EPERM", "seccomp"]);
}
