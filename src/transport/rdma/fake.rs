//! For tests: the verbs library of `tests/fake_verbs`, and memory to use it with. The library is compiled when it is first asked for.

#![allow(unsafe_code)]

#[path = "../../../tests/fake_verbs/compile.rs"]
mod compile;

use std::ffi::{CString, c_char, c_int, c_long, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use super::verbs::Library;
use crate::sys::MemoryRange;
use crate::sys::memory::store_checked;
use crate::sys::pages::tests::Mapping;

/// A fake verbs library with state of its own: each test has another one.
pub struct Fake {
    /// The library, as the transport sees it.
    pub library: &'static Library,
    set: unsafe extern "C" fn(c_int, *const c_char, c_long) -> c_int,
    get: unsafe extern "C" fn(c_int, *const c_char) -> c_long,
    event: unsafe extern "C" fn(c_int, c_int),
}

impl Fake {
    /// A library with that many devices, `fake0` and so on.
    pub fn new(devices: i64) -> Fake {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // The loader takes a copy for another library.
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let copy = compiled().with_file_name(format!("libibverbs-{}-{number}.so.1", std::process::id()));
        std::fs::copy(compiled(), &copy).unwrap();
        let library = Library::load(&copy).unwrap();
        let name = CString::new(copy.as_os_str().as_bytes()).unwrap();
        // SAFETY: the library is loaded, and this gives its handle again.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        assert!(!handle.is_null());
        std::fs::remove_file(&copy).unwrap();
        let find = |name: &std::ffi::CStr| -> *mut c_void {
            // SAFETY: the handle is of a loaded library.
            let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
            assert!(!address.is_null(), "{name:?}");
            address
        };
        // SAFETY: the functions of the C file have these types.
        let fake = unsafe {
            Fake {
                library,
                set: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, *const c_char, c_long) -> c_int>(find(
                    c"fake_verbs_set",
                )),
                get: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, *const c_char) -> c_long>(find(
                    c"fake_verbs_get",
                )),
                event: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, c_int)>(find(c"fake_verbs_event")),
            }
        };
        fake.set(-1, "devices", devices);
        fake
    }

    /// Changes a setting of a device, or of all of them with -1.
    pub fn set(&self, device: i32, name: &str, value: i64) {
        let text = CString::new(name).unwrap();
        // SAFETY: a C string that is read during the call.
        assert_eq!(unsafe { (self.set)(device, text.as_ptr(), value) }, 0, "{name}");
    }

    /// Reads a counter of a device, or its sum over all of them with -1.
    pub fn get(&self, device: i32, name: &str) -> i64 {
        let text = CString::new(name).unwrap();
        // SAFETY: as above.
        unsafe { (self.get)(device, text.as_ptr()) }
    }

    /// Raises an event, by its number in verbs.h, in all contexts of a device.
    pub fn event(&self, device: i32, event: i32) {
        // SAFETY: a device that there is.
        unsafe { (self.event)(device, event) }
    }
}

/// The compiled library.
fn compiled() -> &'static Path {
    static COMPILED: OnceLock<PathBuf> = OnceLock::new();
    COMPILED.get_or_init(|| compile::compile(Path::new(env!("OUT_DIR"))))
}

/// Pages of this test alone.
pub struct Memory(Mapping);

impl Memory {
    /// Zeroed memory of that many bytes.
    pub fn new(length: usize) -> Memory {
        Memory(Mapping::anonymous(length))
    }

    /// A range that was mapped once.
    pub fn unmapped(length: u64) -> MemoryRange {
        Memory::new(length as usize).range(0, length)
    }

    /// A part of it, to be used no longer than it is there.
    pub fn range(&self, offset: u64, length: u64) -> MemoryRange {
        self.0.range().part(offset, length).unwrap()
    }

    /// Writes from the beginning on.
    pub fn write(&self, bytes: &[u8]) {
        store_checked(self.range(0, bytes.len() as u64), bytes).unwrap();
    }

    /// All of its bytes.
    pub fn read(&self) -> Vec<u8> {
        (0..self.0.range().length() as usize).map(|at| self.0.read(at)).collect()
    }
}
