//! Which memory is a CUDA device's, so that the host must not copy it.
//!
//! The program's own driver is asked, if it has loaded one: whoever has memory of a device has. Cost where there is none: a look at the
//! loader's count of libraries, which is no system call; else one or two calls of the driver for each answer.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// `cuPointerGetAttribute`.
type GetAttribute = unsafe extern "C" fn(*mut c_void, c_int, u64) -> c_int;

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, and its value for memory of the host.
const MEMORY_TYPE: c_int = 2;
const HOST: c_uint = 1;
/// `CU_POINTER_ATTRIBUTE_IS_MANAGED`: the host may use it, wherever it is.
const IS_MANAGED: c_int = 8;

/// The driver, if the program has loaded it by now.
#[derive(Clone, Copy)]
pub struct Driver(Option<GetAttribute>);

impl Driver {
    /// Looks for it, where a library was loaded since the last look.
    pub fn find() -> Driver {
        static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
        static LOADS_SEEN: AtomicU64 = AtomicU64::new(0);
        let mut found = FOUND.load(Ordering::Acquire);
        if found.is_null() {
            let loads = count_loads();
            if LOADS_SEEN.load(Ordering::Relaxed) != loads {
                found = look_up();
                FOUND.store(found, Ordering::Release);
                LOADS_SEEN.store(loads, Ordering::Relaxed);
            }
        }
        // SAFETY: it is NULL or the function of that name, which has this type in all versions of CUDA.
        Driver(unsafe { std::mem::transmute::<*mut c_void, Option<GetAttribute>>(found) })
    }

    /// Whether the address is one of a device that the host cannot use.
    pub fn owns(&self, address: u64) -> bool {
        let Some(get_attribute) = self.0 else { return false };
        let ask = |attribute| {
            let mut value: c_uint = 0;
            // SAFETY: both attributes are written as 32 bits. Addresses that the driver does not know are refused.
            let outcome = unsafe { get_attribute((&raw mut value).cast(), attribute, address) };
            (outcome == 0).then_some(value)
        };
        ask(MEMORY_TYPE).is_some_and(|kind| kind != HOST) && ask(IS_MANAGED).unwrap_or(0) & 1 == 0
    }
}

/// How many libraries the process has ever loaded.
fn count_loads() -> u64 {
    unsafe extern "C" fn read_first(info: *mut libc::dl_phdr_info, _: usize, loads: *mut c_void) -> c_int {
        // SAFETY: the loader passes its own struct, and what it was given: a place for a number.
        unsafe { loads.cast::<u64>().write((*info).dlpi_adds) };
        1
    }
    let mut loads = 0_u64;
    // SAFETY: the function is as the loader expects it, and `loads` lives as long as the call.
    unsafe { libc::dl_iterate_phdr(Some(read_first), (&raw mut loads).cast()) };
    loads
}

fn look_up() -> *mut c_void {
    // SAFETY: C strings. A library that is not loaded yet is not loaded by this, and one that is stays loaded.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if library.is_null() { library } else { libc::dlsym(library, c"cuPointerGetAttribute".as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_the_hosts_where_no_driver_is_loaded() {
        let byte = 0_u8;
        assert!(!Driver::find().owns(&raw const byte as u64));
        assert!(count_loads() > 0);
    }

    #[test]
    fn what_the_driver_says_decides() {
        /// Addresses say themselves what they are: the type in the lower byte, managed or not above it, unknown above that.
        unsafe extern "C" fn answer(value: *mut c_void, attribute: c_int, address: u64) -> c_int {
            let answer = if attribute == MEMORY_TYPE { address & 0xff } else { address >> 8 & 0xff };
            // SAFETY: the place is a `c_uint`.
            unsafe { value.cast::<c_uint>().write(answer as c_uint) };
            (address >> 16) as c_int
        }
        let driver = Driver(Some(answer));
        assert_eq!([0x1, 0x2, 0x3, 0x102, 0x1_0002].map(|address| driver.owns(address)), [false, true, true, false, false]);
    }
}
