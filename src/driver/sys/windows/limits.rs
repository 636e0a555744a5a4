//! What the system allows this process.

use windows_sys::Win32::System::LibraryLoader::{GetModuleHandleA, GetProcAddress};
use windows_sys::Win32::System::SystemInformation::OSVERSIONINFOW;
use windows_sys::core::PCSTR;

/// Sockets of this process: Windows has no limit of their number besides memory.
pub(crate) fn nofile_limit() -> u64 {
    u64::MAX
}

/// Raises this process's limit of open files to what it is allowed at most, and returns that. Windows has no
/// such limit: nothing happens, and the answer is [`u64::MAX`].
///
/// # Errors
/// None on Windows.
pub fn raise_nofile_limit() -> std::io::Result<u64> {
    Ok(u64::MAX)
}

/// A limit of locked memory, if there is one. Windows locks what an operation uses, and limits it by
/// nothing that could be asked for.
pub(crate) fn memlock_limit_enforced() -> Option<u64> {
    None
}

/// A function of `ntdll.dll`, which every process has loaded.
fn ntdll(name: &std::ffi::CStr) -> Option<unsafe extern "system" fn() -> isize> {
    // SAFETY: the name is a string that ends with 0 and outlives the call (invariant 5).
    let module = unsafe { GetModuleHandleA(c"ntdll.dll".as_ptr() as PCSTR) };
    if module.is_null() {
        return None;
    }
    // SAFETY: the module is loaded for the process's life, the name ends with 0 (invariant 5).
    unsafe { GetProcAddress(module, name.as_ptr() as PCSTR) }
}

/// Windows' version, such as `Windows 10.0.20348`, and whether it is Wine.
///
/// `RtlGetVersion` tells it as it is; the documented `GetVersionEx` tells programs without a manifest that
/// they run on Windows 8.
pub(crate) fn kernel_version() -> String {
    type RtlGetVersion = unsafe extern "system" fn(*mut OSVERSIONINFOW) -> i32;
    type WineGetVersion = unsafe extern "C" fn() -> *const std::ffi::c_char;
    let mut info = OSVERSIONINFOW {
        dwOSVersionInfoSize: size_of::<OSVERSIONINFOW>() as u32,
        ..OSVERSIONINFOW::default()
    };
    let mut version = "Windows".to_owned();
    if let Some(function) = ntdll(c"RtlGetVersion") {
        // SAFETY: this is the signature that the function is documented with (invariant 5).
        let function =
            unsafe { std::mem::transmute::<unsafe extern "system" fn() -> isize, RtlGetVersion>(function) };
        // SAFETY: `info` outlives the call and says how long it is (invariant 5).
        if unsafe { function(&raw mut info) } == 0 {
            version =
                format!("Windows {}.{}.{}", info.dwMajorVersion, info.dwMinorVersion, info.dwBuildNumber);
        }
    }
    if let Some(function) = ntdll(c"wine_get_version") {
        // SAFETY: this is the signature that the function is documented with (invariant 5).
        let function =
            unsafe { std::mem::transmute::<unsafe extern "system" fn() -> isize, WineGetVersion>(function) };
        // SAFETY: takes no pointer (invariant 5).
        let text = unsafe { function() };
        // SAFETY: a static string that ends with 0 (invariant 5).
        let text = unsafe { std::ffi::CStr::from_ptr(text) };
        version = format!("{version} (wine {})", text.to_string_lossy());
    }
    version
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_one_that_the_backend_runs_on() {
        let version = kernel_version();
        let major = version.strip_prefix("Windows ").and_then(|rest| rest.split('.').next());
        let major: u32 = major.and_then(|text| text.parse().ok()).expect("a number");
        assert!(major >= 6, "{version}");
    }
}
