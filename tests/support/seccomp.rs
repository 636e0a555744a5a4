//! A system call filter that forbids io_uring, as those of Docker and containerd do.

/// Makes io_uring's system calls fail with `errno` from now on, for this thread, the threads that it starts, and
/// whatever program it becomes.
pub fn forbid_io_uring(errno: i32) {
    forbid(libc::SYS_io_uring_setup, libc::SYS_io_uring_register, errno);
}

/// The same for the system calls from `first` to `last`: of io_uring's three, which follow each other, for a part.
pub fn forbid(first: libc::c_long, last: libc::c_long, errno: i32) {
    const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
    const AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
    const ABOVE: u16 = 0x25; // BPF_JMP | BPF_JGT | BPF_K
    const RETURN: u16 = 0x06; // BPF_RET | BPF_K
    let rule = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut rules = [
        rule(LOAD, 0, 0, 0),
        rule(AT_LEAST, 0, 2, first as u32),
        rule(ABOVE, 1, 0, last as u32),
        rule(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        rule(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: rules.len() as u16, filter: rules.as_mut_ptr() };
    // SAFETY: takes integers only.
    let result = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(result, 0, "no_new_privs: {}", std::io::Error::last_os_error());
    // SAFETY: the program outlives the call, which copies it.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(result, 0, "seccomp: {}", std::io::Error::last_os_error());
}
