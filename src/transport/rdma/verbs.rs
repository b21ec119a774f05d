//! The verbs library, loaded at run time, behind types that own what they make.
//!
//! Everything unsafe about verbs is here. The library is opened by `dlopen`, because the engine must load on machines without it, and
//! is never closed, because its providers keep threads and state. Types and the operations that verbs.h defines inline come from
//! rdma-sys; each function of the table is checked against rdma-sys's declaration at compile time. Extended verbs are not used:
//! rdma-sys takes every context of a 64-bit machine for one that has none.
//!
//! Invariants: an object holds what it was made from, so children go first; a raw pointer stays valid as long as its owner; memory is
//! named by [`MemoryRange`], whose maker vouches for it. Whoever registers or posts a range keeps it from being released until the
//! memory region is gone or the work has completed.
//!
//! Nothing here locks; the verbs library is thread safe, and locks a queue while it is posted to or polled. Posting and polling are
//! calls into user-space drivers and cost some 100 ns; everything else is a system call.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use parking_lot::Mutex;
use rdma_sys::{
    _compat_ibv_port_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid, ibv_mr, ibv_pd,
    ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state, ibv_send_flags, ibv_send_wr, ibv_sge,
    ibv_wc, ibv_wc_status, ibv_wr_opcode,
};

use crate::sys::MemoryRange;
use crate::transport::Opcode;

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the library that are called.
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Registers with access flags that a device may ignore, such as relaxed ordering; libraries before 1.8 lack it.
            ibv_reg_mr_iova2: Option<RegisterWithOptions>,
        }

        // Evaluated by the compiler alone: code that is run must not refer to these symbols, or the library would be needed to load.
        const _: () = {
            $(let _: unsafe extern "C" fn($($argument),*) $(-> $result)? = rdma_sys::$name;)*
            let _: RegisterWithOptions = rdma_sys::ibv_reg_mr_iova2;
        };

        impl Functions {
            /// Fails with the name of the first function that is missing.
            fn load(handle: *mut c_void) -> Result<Functions, &'static str> {
                Ok(Functions {
                    $($name: {
                        let address = symbol(handle, concat!(stringify!($name), "\0")).ok_or(stringify!($name))?;
                        // SAFETY: libibverbs exports a function of this name, whose type is that of rdma-sys's declaration.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(address) }
                    },)*
                    ibv_reg_mr_iova2: symbol(handle, "ibv_reg_mr_iova2\0").map(|address| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, RegisterWithOptions>(address) }
                    }),
                })
            }
        }
    };
}

type RegisterWithOptions = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;

functions! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list: fn(*mut *mut ibv_device);
    ibv_get_device_name: fn(*mut ibv_device) -> *const c_char;
    ibv_open_device: fn(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device: fn(*mut ibv_context) -> c_int;
    ibv_get_async_event: fn(*mut ibv_context, *mut rdma_sys::ibv_async_event) -> c_int;
    ibv_ack_async_event: fn(*mut rdma_sys::ibv_async_event);
    ibv_query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    ibv_query_port: fn(*mut ibv_context, u8, *mut _compat_ibv_port_attr) -> c_int;
    ibv_query_gid: fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int;
    ibv_reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_dereg_mr: fn(*mut ibv_mr) -> c_int;
    ibv_create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
    ibv_create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    ibv_destroy_cq: fn(*mut ibv_cq) -> c_int;
    ibv_get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut ibv_cq, c_uint);
    ibv_create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    ibv_query_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
    ibv_destroy_qp: fn(*mut ibv_qp) -> c_int;
    ibv_wc_status_str: fn(ibv_wc_status::Type) -> *const c_char;
}

/// `name` ends with a zero byte. `None` where the library has no such symbol.
fn symbol(handle: *mut c_void, name: &str) -> Option<*mut c_void> {
    let name = CStr::from_bytes_with_nul(name.as_bytes()).ok()?;
    // SAFETY: the handle is of a library that is never closed; the name is a C string. The newest version of a symbol is found.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// The outcome of a function that returns 0 or an errno, or -1 and sets errno.
fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        negative if negative < 0 => Err(io::Error::last_os_error()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// The outcome of a function that returns a pointer, or null and sets errno.
fn check_pointer<T>(pointer: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(|| match io::Error::last_os_error() {
        // Some providers forget to say why.
        error if error.raw_os_error() == Some(0) => io::Error::from_raw_os_error(libc::EIO),
        error => error,
    })
}

/// A loaded verbs library. Lives as long as the process.
pub struct Library {
    functions: Functions,
    path: PathBuf,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())
    }
}

/// Why there is no verbs library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadError {
    /// The loader's own words.
    NotLoaded(String),
    /// It lacks a function, so it is not what it should be, or it is very old.
    MissingFunction(&'static str),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::NotLoaded(reason) => write!(f, "{reason}"),
            LoadError::MissingFunction(name) => write!(f, "it has no function {name}"),
        }
    }
}

impl Library {
    /// Loads the library, or gives it again: a path is loaded once per process. Failures are tried anew each time.
    pub fn load(path: &Path) -> Result<&'static Library, LoadError> {
        static LOADED: Mutex<BTreeMap<PathBuf, &'static Library>> = Mutex::new(BTreeMap::new());
        let mut loaded = LOADED.lock();
        if let Some(library) = loaded.get(path) {
            return Ok(library);
        }
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| LoadError::NotLoaded("a zero byte in its name".into()))?;
        // SAFETY: runs the initializers of a verbs library, which the operator has named or the system holds.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(LoadError::NotLoaded(loader_error()));
        }
        let functions = Functions::load(handle).map_err(LoadError::MissingFunction)?;
        let library: &'static Library = Box::leak(Box::new(Library { functions, path: path.to_path_buf() }));
        loaded.insert(path.to_path_buf(), library);
        Ok(library)
    }

    /// Where it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of the devices. ENOSYS where the kernel has no RDMA, which is as good as none.
    pub fn device_names(&self) -> io::Result<Vec<String>> {
        let list = DeviceList::get(self)?;
        Ok(list.devices().iter().map(|device| list.name(*device)).collect())
    }

    /// Opens the device of this name. ENODEV where there is none.
    pub fn open(&'static self, name: &str) -> io::Result<Arc<Context>> {
        let list = DeviceList::get(self)?;
        let device = list.devices().iter().find(|device| list.name(**device) == name);
        let device = *device.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))?;
        // SAFETY: the device is of the list, which is held until the device is open; the context holds the device itself.
        let raw = check_pointer(unsafe { (self.functions.ibv_open_device)(device) })?;
        let context = Arc::new(Context { library: self, raw });
        // Events are asked for when the descriptor says that there are some; asking must never block.
        set_nonblocking(context.async_descriptor().as_raw_fd())?;
        Ok(context)
    }

    /// What the library calls a completion's status.
    pub fn status_text(&self, status: u32) -> String {
        // SAFETY: returns a constant for every number.
        let text = unsafe { (self.functions.ibv_wc_status_str)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: a constant C string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// What `dlopen` says about its last failure on this thread.
fn loader_error() -> String {
    // SAFETY: returns a text of this thread, or null; it is copied before another call could change it.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() { "unknown reason".to_string() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    }
}

fn set_nonblocking(descriptor: RawFd) -> io::Result<()> {
    // SAFETY: only flags of a descriptor are read and written.
    let result = unsafe {
        match libc::fcntl(descriptor, libc::F_GETFL) {
            -1 => -1,
            flags => libc::fcntl(descriptor, libc::F_SETFL, flags | libc::O_NONBLOCK),
        }
    };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The devices at one time; they stay valid until it is dropped.
struct DeviceList<'a> {
    library: &'a Library,
    list: NonNull<*mut ibv_device>,
    count: usize,
}

impl DeviceList<'_> {
    fn get(library: &Library) -> io::Result<DeviceList<'_>> {
        let mut count = 0;
        // SAFETY: writes the one number.
        let list = check_pointer(unsafe { (library.functions.ibv_get_device_list)(&mut count) })?;
        Ok(DeviceList { library, list, count: usize::try_from(count).unwrap_or(0) })
    }

    fn devices(&self) -> &[*mut ibv_device] {
        // SAFETY: the library has made an array of that many pointers.
        unsafe { std::slice::from_raw_parts(self.list.as_ptr(), self.count) }
    }

    fn name(&self, device: *mut ibv_device) -> String {
        // SAFETY: the device is of this list; its name is a C string inside it.
        unsafe { CStr::from_ptr((self.library.functions.ibv_get_device_name)(device)).to_string_lossy().into_owned() }
    }
}

impl Drop for DeviceList<'_> {
    fn drop(&mut self) {
        // SAFETY: made by ibv_get_device_list and freed once.
        unsafe { (self.library.functions.ibv_free_device_list)(self.list.as_ptr()) }
    }
}

/// Declares that a type's raw pointer may be used from any thread.
macro_rules! thread_safe {
    ($($name:ident),*) => {$(
        // SAFETY: verbs objects may be used from any thread, and from several at once; destroying them takes the owner.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}
thread_safe!(Context, ProtectionDomain, MemoryRegion, CompletionChannel, CompletionQueue, QueuePair);

/// An open device.
pub struct Context {
    library: &'static Library,
    raw: NonNull<ibv_context>,
}

/// What a device can do at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Bytes of one memory region.
    pub max_mr_size: u64,
    /// Memory regions.
    pub max_mr: u32,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests in one queue.
    pub max_qp_wr: u32,
    /// Pieces of local memory in one work request.
    pub max_sge: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of one completion queue.
    pub max_cqe: u32,
    /// RDMA reads that a queue pair may answer at a time.
    pub max_qp_rd_atom: u8,
    /// RDMA reads that a queue pair may have under way at a time.
    pub max_qp_init_rd_atom: u8,
    /// Ports, numbered from 1.
    pub ports: u8,
}

/// State of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortState {
    /// Whether it carries traffic.
    pub active: bool,
    /// Path MTU that the link allows now, in bytes.
    pub mtu: u32,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Entries of the GID table.
    pub gids: u32,
    /// Whether the link is Ethernet, where GIDs are RoCE's.
    pub ethernet: bool,
    /// Speed of a lane as verbs encode it.
    pub active_speed: u8,
    /// Number of lanes as verbs encode it.
    pub active_width: u8,
}

/// What happened to a device, or to a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The device is lost for good; nothing on it works.
    DeviceFatal,
    /// The port carries traffic again.
    PortActive(u8),
    /// The port carries no traffic any more.
    PortError(u8),
    /// The port has another local identifier.
    LidChange(u8),
    /// The port's GID table has changed.
    GidChange(u8),
    /// A queue pair, named by its number, cannot be used any more.
    QueuePairFatal(u32),
    /// A completion queue has overrun or failed.
    CompletionQueueError,
    /// Something that asks for nothing: the number of the event.
    Other(u32),
}

/// The C structure with the event's type as a plain number: a kernel may know types that rdma-sys's enumeration does not.
#[repr(C)]
struct RawEvent {
    element: *mut c_void,
    kind: u32,
}
const _: () = assert!(size_of::<RawEvent>() == size_of::<rdma_sys::ibv_async_event>());

impl Context {
    /// The library that it was opened by.
    pub fn library(&self) -> &'static Library {
        self.library
    }

    fn functions(&self) -> &'static Functions {
        &self.library.functions
    }

    /// Asks the device for its limits.
    pub fn limits(&self) -> io::Result<DeviceLimits> {
        // SAFETY: plain numbers, for which zero is a value.
        let mut attributes: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; the structure is the library's own.
        check(unsafe { (self.functions().ibv_query_device)(self.raw.as_ptr(), &mut attributes) })?;
        let count = |number: c_int| u32::try_from(number).unwrap_or(0);
        let depth = |number: c_int| u8::try_from(number.clamp(0, 255)).unwrap_or(u8::MAX);
        Ok(DeviceLimits {
            max_mr_size: attributes.max_mr_size,
            max_mr: count(attributes.max_mr),
            max_qp: count(attributes.max_qp),
            max_qp_wr: count(attributes.max_qp_wr),
            max_sge: count(attributes.max_sge),
            max_cq: count(attributes.max_cq),
            max_cqe: count(attributes.max_cqe),
            max_qp_rd_atom: depth(attributes.max_qp_rd_atom),
            max_qp_init_rd_atom: depth(attributes.max_qp_init_rd_atom),
            ports: attributes.phys_port_cnt,
        })
    }

    /// Asks for the state of a port.
    pub fn port(&self, port: u8) -> io::Result<PortState> {
        // Zeroed, because the function fills what an older structure had.
        // SAFETY: plain numbers, for which zero is a value.
        let mut attributes: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the function fills a prefix of the structure, which rdma-sys declares as opaque.
        check(unsafe { (self.functions().ibv_query_port)(self.raw.as_ptr(), port, (&raw mut attributes).cast()) })?;
        Ok(PortState {
            active: attributes.state == rdma_sys::ibv_port_state::IBV_PORT_ACTIVE,
            mtu: mtu_bytes(attributes.active_mtu),
            lid: attributes.lid,
            gids: u32::try_from(attributes.gid_tbl_len).unwrap_or(0),
            ethernet: attributes.link_layer == LINK_LAYER_ETHERNET,
            active_speed: attributes.active_speed,
            active_width: attributes.active_width,
        })
    }

    /// Reads an entry of a port's GID table; unused entries are zero.
    pub fn gid(&self, port: u8, index: u32) -> io::Result<[u8; 16]> {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open; 16 bytes are written.
        check(unsafe { (self.functions().ibv_query_gid)(self.raw.as_ptr(), port, index as c_int, &mut gid) })?;
        // SAFETY: all 16 bytes are initialized.
        Ok(unsafe { gid.raw })
    }

    /// Readable when there is an event; to be watched, and nothing else.
    pub fn async_descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the context, which outlives the borrow.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).async_fd) }
    }

    /// The next event, if there is one. Never blocks.
    pub fn next_event(&self) -> io::Result<Option<AsyncEvent>> {
        let mut event = RawEvent { element: ptr::null_mut(), kind: u32::MAX };
        // SAFETY: the structure has the size and layout of the library's.
        match check(unsafe { (self.functions().ibv_get_async_event)(self.raw.as_ptr(), (&raw mut event).cast()) }) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
        // A union of pointers and an int, which is in the first bytes.
        // SAFETY: the union is initialized at least that far; reading a pointer's bytes as a number is fine.
        let port = unsafe { (&raw const event.element).cast::<c_int>().read() } as u8;
        use rdma_sys::ibv_event_type as kind;
        let is = |known: kind| event.kind == known as u32;
        let decoded = if is(kind::IBV_EVENT_DEVICE_FATAL) {
            AsyncEvent::DeviceFatal
        } else if is(kind::IBV_EVENT_PORT_ACTIVE) {
            AsyncEvent::PortActive(port)
        } else if is(kind::IBV_EVENT_PORT_ERR) {
            AsyncEvent::PortError(port)
        } else if is(kind::IBV_EVENT_LID_CHANGE) {
            AsyncEvent::LidChange(port)
        } else if is(kind::IBV_EVENT_GID_CHANGE) {
            AsyncEvent::GidChange(port)
        } else if is(kind::IBV_EVENT_QP_FATAL) || is(kind::IBV_EVENT_QP_REQ_ERR) || is(kind::IBV_EVENT_QP_ACCESS_ERR) {
            // SAFETY: these events carry a queue pair, which cannot be destroyed before the event is acknowledged.
            AsyncEvent::QueuePairFatal(unsafe { (*event.element.cast::<ibv_qp>()).qp_num })
        } else if is(kind::IBV_EVENT_CQ_ERR) {
            AsyncEvent::CompletionQueueError
        } else {
            AsyncEvent::Other(event.kind)
        };
        // SAFETY: the event is as it was given, and is acknowledged once.
        unsafe { (self.functions().ibv_ack_async_event)((&raw mut event).cast()) };
        Ok(Some(decoded))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: whatever was made from the context holds it, so nothing is left.
        unsafe { (self.functions().ibv_close_device)(self.raw.as_ptr()) };
    }
}

/// `IBV_LINK_LAYER_ETHERNET`, which is in an anonymous enumeration.
const LINK_LAYER_ETHERNET: u8 = 2;

/// Bytes of verbs' encoded path MTU: 1 is 256, each further step doubles it.
fn mtu_bytes(encoded: u32) -> u32 {
    128 << encoded.clamp(1, 5)
}

/// The largest encoded path MTU that is not above that many bytes.
fn mtu_code(bytes: u32) -> u32 {
    (2..=5).rev().find(|code| mtu_bytes(*code) <= bytes).unwrap_or(1)
}

/// What belongs together on a device: queue pairs may only use memory of their own domain.
pub struct ProtectionDomain {
    context: Arc<Context>,
    raw: NonNull<ibv_pd>,
}

impl ProtectionDomain {
    /// Makes one.
    pub fn new(context: &Arc<Context>) -> io::Result<Arc<ProtectionDomain>> {
        // SAFETY: the context is open.
        let raw = check_pointer(unsafe { (context.functions().ibv_alloc_pd)(context.raw.as_ptr()) })?;
        Ok(Arc::new(ProtectionDomain { context: context.clone(), raw }))
    }

    /// The device it is on.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: whatever was made from the domain holds it, so nothing is left.
        unsafe { (self.context.functions().ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// What a memory region may be used for; local reading always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Peers may read and write it.
    pub remote: bool,
    /// The device may order its writes as it likes, where it can; ignored where the library does not know the flag.
    pub relaxed_ordering: bool,
    /// The device may write into it; false for memory that is mapped for reading only.
    pub local_write: bool,
}

/// Memory that is pinned and known to a device.
pub struct MemoryRegion {
    domain: Arc<ProtectionDomain>,
    raw: NonNull<ibv_mr>,
}

impl MemoryRegion {
    /// Pins the range, and makes it known to the device. Blocks as long as the kernel needs; several threads may do it at once.
    /// EFAULT: it is not mapped, or not writable. ENOMEM: RLIMIT_MEMLOCK, or the device has no room.
    pub fn register(domain: &Arc<ProtectionDomain>, range: MemoryRange, access: Access) -> io::Result<MemoryRegion> {
        use rdma_sys::ibv_access_flags as flags;
        let functions = domain.context.functions();
        let mut bits = 0;
        if access.local_write {
            bits |= flags::IBV_ACCESS_LOCAL_WRITE.0;
        }
        if access.remote {
            bits |= flags::IBV_ACCESS_REMOTE_READ.0;
            if access.local_write {
                bits |= flags::IBV_ACCESS_REMOTE_WRITE.0;
            }
        }
        let (address, length) = (range.address() as *mut c_void, range.length() as usize);
        // SAFETY: the range was promised by `MemoryRange::new`; the kernel checks that it is mapped with that access.
        let raw = unsafe {
            match functions.ibv_reg_mr_iova2 {
                Some(register) if access.relaxed_ordering => {
                    bits |= flags::IBV_ACCESS_RELAXED_ORDERING.0;
                    register(domain.raw.as_ptr(), address, length, range.address(), bits)
                }
                _ => (functions.ibv_reg_mr)(domain.raw.as_ptr(), address, length, bits as c_int),
            }
        };
        Ok(MemoryRegion { domain: domain.clone(), raw: check_pointer(raw)? })
    }

    /// What names it in work requests of this process.
    pub fn local_key(&self) -> u32 {
        // SAFETY: the region is registered.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    /// What names it in work requests of peers.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: the region is registered.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    /// Unpins the range; the device does not touch it any more. On failure it is as it was.
    pub fn deregister(self) -> Result<(), (MemoryRegion, io::Error)> {
        // SAFETY: the region is registered, and forgotten if this succeeds.
        match check(unsafe { (self.domain.context.functions().ibv_dereg_mr)(self.raw.as_ptr()) }) {
            Ok(()) => {
                let mut gone = std::mem::ManuallyDrop::new(self);
                // SAFETY: `gone` is never used again, so the reference is given back once.
                unsafe { ptr::drop_in_place(&mut gone.domain) };
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: the region is registered, and deregistered once.
        unsafe { (self.domain.context.functions().ibv_dereg_mr)(self.raw.as_ptr()) };
    }
}

/// Where completion queues say that something has completed, so that a thread can sleep meanwhile.
pub struct CompletionChannel {
    context: Arc<Context>,
    raw: NonNull<ibv_comp_channel>,
}

impl CompletionChannel {
    /// Makes one.
    pub fn new(context: &Arc<Context>) -> io::Result<Arc<CompletionChannel>> {
        // SAFETY: the context is open.
        let raw = check_pointer(unsafe { (context.functions().ibv_create_comp_channel)(context.raw.as_ptr()) })?;
        let channel = CompletionChannel { context: context.clone(), raw };
        set_nonblocking(channel.descriptor().as_raw_fd())?;
        Ok(Arc::new(channel))
    }

    /// Readable when there is an event; to be watched, and nothing else.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the channel, which outlives the borrow.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }

    /// Takes all events that there are, and returns how many. Never blocks. A queue whose event was taken must be armed again, and
    /// polled after that, before sleeping.
    pub fn take_events(&self) -> io::Result<usize> {
        let mut taken = 0;
        loop {
            let (mut queue, mut cookie) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is open; both pointers are written on success.
            match check(unsafe { (self.context.functions().ibv_get_cq_event)(self.raw.as_ptr(), &mut queue, &mut cookie) }) {
                // SAFETY: destroying a queue waits until its events are acknowledged, so it is still there.
                Ok(()) => unsafe { (self.context.functions().ibv_ack_cq_events)(queue, 1) },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(taken),
                Err(error) => return Err(error),
            }
            taken += 1;
        }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: queues hold their channel, so none uses it.
        unsafe { (self.context.functions().ibv_destroy_comp_channel)(self.raw.as_ptr()) };
    }
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The bytes are in place.
    Success,
    /// The queue pair failed before its turn came.
    Flushed,
    /// This side's fault: a bad range, key or request.
    Local,
    /// The peer's memory does not allow it: a wrong key, range or access.
    RemoteAccess,
    /// The peer does not answer, or answered with another error.
    Remote,
}

/// A work request that is over.
#[derive(Clone, Copy, Debug)]
pub struct WorkCompletion {
    /// The number it was posted with.
    pub id: u64,
    /// How it ended, by kind.
    pub outcome: Outcome,
    /// The number of verbs, for messages; see [`Library::status_text`].
    pub status: u32,
    /// The device maker's own number, for messages.
    pub vendor_error: u32,
    /// Number of the queue pair that it was posted on.
    pub queue_pair: u32,
}

impl WorkCompletion {
    fn from_raw(raw: &ibv_wc) -> WorkCompletion {
        let outcome = match raw.status {
            ibv_wc_status::IBV_WC_SUCCESS => Outcome::Success,
            ibv_wc_status::IBV_WC_WR_FLUSH_ERR => Outcome::Flushed,
            ibv_wc_status::IBV_WC_LOC_LEN_ERR
            | ibv_wc_status::IBV_WC_LOC_QP_OP_ERR
            | ibv_wc_status::IBV_WC_LOC_PROT_ERR
            | ibv_wc_status::IBV_WC_MW_BIND_ERR
            | ibv_wc_status::IBV_WC_LOC_ACCESS_ERR => Outcome::Local,
            ibv_wc_status::IBV_WC_REM_ACCESS_ERR => Outcome::RemoteAccess,
            _ => Outcome::Remote,
        };
        let (id, status, vendor_error, queue_pair) = (raw.wr_id, raw.status, raw.vendor_err, raw.qp_num);
        WorkCompletion { id, outcome, status, vendor_error, queue_pair }
    }
}

/// Where work requests come out when they are over.
pub struct CompletionQueue {
    context: Arc<Context>,
    channel: Option<Arc<CompletionChannel>>,
    raw: NonNull<ibv_cq>,
}

impl CompletionQueue {
    /// Makes a queue with room for at least that many completions. With a channel it can be armed.
    pub fn new(context: &Arc<Context>, entries: u32, channel: Option<&Arc<CompletionChannel>>) -> io::Result<Arc<CompletionQueue>> {
        let entries = c_int::try_from(entries).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        let raw_channel = channel.map_or(ptr::null_mut(), |channel| channel.raw.as_ptr());
        // SAFETY: the context is open, and the channel, if any, is held as long as the queue. Vector 0 is always there.
        let raw = unsafe { (context.functions().ibv_create_cq)(context.raw.as_ptr(), entries, ptr::null_mut(), raw_channel, 0) };
        Ok(Arc::new(CompletionQueue { context: context.clone(), channel: channel.cloned(), raw: check_pointer(raw)? }))
    }

    /// Completions that it has room for; at least what was asked for.
    pub fn capacity(&self) -> u32 {
        // SAFETY: the queue is there.
        u32::try_from(unsafe { (*self.raw.as_ptr()).cqe }).unwrap_or(0)
    }

    /// The channel that it was made with.
    pub fn channel(&self) -> Option<&Arc<CompletionChannel>> {
        self.channel.as_ref()
    }

    /// Takes up to `limit` completions and hands each to `each`; returns how many. Never blocks.
    pub fn poll(&self, limit: usize, mut each: impl FnMut(WorkCompletion)) -> io::Result<usize> {
        const AT_ONCE: usize = 16;
        let mut room = [const { MaybeUninit::<ibv_wc>::uninit() }; AT_ONCE];
        let mut taken = 0;
        while taken < limit {
            let asked = (limit - taken).min(AT_ONCE);
            // SAFETY: the queue is there; up to `asked` entries of the array are written.
            let polled = unsafe { rdma_sys::ibv_poll_cq(self.raw.as_ptr(), asked as c_int, room.as_mut_ptr().cast()) };
            // Providers answer -1, or the negated errno.
            let polled =
                usize::try_from(polled).map_err(|_| io::Error::from_raw_os_error(if polled < -1 { -polled } else { libc::EIO }))?;
            for completion in &room[..polled.min(asked)] {
                // SAFETY: the first `polled` entries were written: id and status always, the rest as far as it is read for messages.
                each(WorkCompletion::from_raw(unsafe { completion.assume_init_ref() }));
            }
            taken += polled;
            if polled < asked {
                break;
            }
        }
        Ok(taken)
    }

    /// Asks for one event on the channel at the next completion. What has completed before is not told: poll once more after it.
    pub fn request_notification(&self) -> io::Result<()> {
        // SAFETY: the queue is there.
        check(unsafe { rdma_sys::ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold their queue, so none uses it.
        unsafe { (self.context.functions().ibv_destroy_cq)(self.raw.as_ptr()) };
    }
}

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairSize {
    /// Work requests that may be outstanding.
    pub work_requests: u32,
    /// Pieces of local memory per work request.
    pub pieces: u32,
    /// Bytes that a work request may carry itself.
    pub inline_bytes: u32,
}

/// The way to a peer's queue pair, as both sides tell each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Number of the peer's queue pair.
    pub queue_pair: u32,
    /// GID of the peer's port.
    pub gid: [u8; 16],
    /// LID of the peer's port; 0 on Ethernet.
    pub lid: u16,
    /// Own port.
    pub port: u8,
    /// Index of the own GID in the port's table.
    pub gid_index: u8,
    /// Path MTU in bytes; rounded down to a power of two from 256 to 4096.
    pub mtu: u32,
    /// Traffic class of the global route.
    pub traffic_class: u8,
    /// Service level.
    pub service_level: u8,
    /// RDMA reads of the peer that are answered at a time, and own ones that are under way at a time.
    pub read_depth: (u8, u8),
}

/// State of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueuePairState {
    /// As made.
    Reset,
    /// Has a port.
    Initialized,
    /// Answers its peer.
    ReadyToReceive,
    /// Sends, too.
    ReadyToSend,
    /// Ends what is under way and starts nothing more.
    Draining,
    /// Has failed, or was made to: everything posted is flushed.
    Failed,
}

/// One contiguous range to be moved to or from the peer's memory.
#[derive(Clone, Copy, Debug)]
pub struct WorkRequest {
    /// Comes back in the completion.
    pub id: u64,
    /// Direction.
    pub opcode: Opcode,
    /// Memory of this process; below 2^32 bytes, and inside the region of `local_key`.
    pub local: MemoryRange,
    /// Names the region that `local` is in.
    pub local_key: u32,
    /// Start of the peer's range.
    pub remote_address: u64,
    /// Names the peer's region.
    pub remote_key: u32,
}

/// Not everything could be posted.
#[derive(Debug)]
pub struct PostError {
    /// Work requests, from the first on, that were posted and will complete. The others were not started. Where the device does not tell
    /// them apart, all that it may have started.
    pub posted: usize,
    /// ENOMEM: the queue is full. EINVAL: the queue pair is not ready to send, or the request is bad. Without a number: the device may have
    /// started requests that never complete.
    pub error: io::Error,
}

/// One end of a reliable connection. Requests that are outstanding when it is dropped never complete.
pub struct QueuePair {
    domain: Arc<ProtectionDomain>,
    /// Held, because completions go there.
    _queue: Arc<CompletionQueue>,
    raw: NonNull<ibv_qp>,
}

impl QueuePair {
    /// Makes one in the state reset, whose completions all go to `queue`.
    pub fn new(domain: &Arc<ProtectionDomain>, queue: &Arc<CompletionQueue>, size: QueuePairSize) -> io::Result<QueuePair> {
        // SAFETY: plain numbers and pointers, for which zero is a value.
        let mut attributes: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        attributes.send_cq = queue.raw.as_ptr();
        attributes.recv_cq = queue.raw.as_ptr();
        attributes.qp_type = rdma_sys::ibv_qp_type::IBV_QPT_RC;
        attributes.cap.max_send_wr = size.work_requests;
        // Nothing is received: peers read and write memory. Some devices refuse a queue without any room.
        attributes.cap.max_recv_wr = 1;
        attributes.cap.max_send_sge = size.pieces;
        attributes.cap.max_recv_sge = 1;
        attributes.cap.max_inline_data = size.inline_bytes;
        // SAFETY: domain and queue are there, and are held as long as the queue pair.
        let raw = check_pointer(unsafe { (domain.context.functions().ibv_create_qp)(domain.raw.as_ptr(), &mut attributes) })?;
        Ok(QueuePair { domain: domain.clone(), _queue: queue.clone(), raw })
    }

    /// The number that the peer must know.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is there.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    fn modify(&self, state: u32, mask: ibv_qp_attr_mask, fill: impl FnOnce(&mut ibv_qp_attr)) -> io::Result<()> {
        // SAFETY: plain numbers, for which zero is a value.
        let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = state;
        fill(&mut attributes);
        let mask = (mask | ibv_qp_attr_mask::IBV_QP_STATE).0 as c_int;
        // SAFETY: the queue pair is there; the attributes are read as far as the mask says.
        check(unsafe { (self.domain.context.functions().ibv_modify_qp)(self.raw.as_ptr(), &mut attributes, mask) })
    }

    /// Forgets everything, outstanding work included: it never completes.
    pub fn reset(&self) -> io::Result<()> {
        self.modify(ibv_qp_state::IBV_QPS_RESET, ibv_qp_attr_mask(0), |_| {})
    }

    /// From reset: gives it a port, and lets peers read and write registered memory.
    pub fn initialize(&self, port: u8, pkey_index: u16) -> io::Result<()> {
        use rdma_sys::ibv_access_flags as flags;
        type Mask = ibv_qp_attr_mask;
        let mask = Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS;
        self.modify(ibv_qp_state::IBV_QPS_INIT, mask, |attributes| {
            attributes.port_num = port;
            attributes.pkey_index = pkey_index;
            let access = flags::IBV_ACCESS_LOCAL_WRITE | flags::IBV_ACCESS_REMOTE_READ | flags::IBV_ACCESS_REMOTE_WRITE;
            attributes.qp_access_flags = access.0;
        })
    }

    /// From initialized: answers the peer's queue pair. EINVAL, among others, where the GIDs cannot reach each other.
    pub fn connect(&self, route: &Route) -> io::Result<()> {
        type Mask = ibv_qp_attr_mask;
        let mask = Mask::IBV_QP_AV
            | Mask::IBV_QP_PATH_MTU
            | Mask::IBV_QP_DEST_QPN
            | Mask::IBV_QP_RQ_PSN
            | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | Mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(ibv_qp_state::IBV_QPS_RTR, mask, |attributes| {
            attributes.path_mtu = mtu_code(route.mtu);
            attributes.dest_qp_num = route.queue_pair;
            attributes.max_dest_rd_atomic = route.read_depth.0;
            attributes.min_rnr_timer = 12;
            let address = &mut attributes.ah_attr;
            address.is_global = 1;
            address.grh.dgid = ibv_gid { raw: route.gid };
            address.grh.sgid_index = route.gid_index;
            address.grh.hop_limit = 16;
            address.grh.traffic_class = route.traffic_class;
            address.dlid = route.lid;
            address.sl = route.service_level;
            address.port_num = route.port;
        })
    }

    /// From ready to receive: sends, too. A peer that does not answer is given up after six tries of 67 ms or more each; soft-RoCE takes
    /// seven for endless.
    pub fn start(&self, route: &Route) -> io::Result<()> {
        type Mask = ibv_qp_attr_mask;
        let mask = Mask::IBV_QP_TIMEOUT
            | Mask::IBV_QP_RETRY_CNT
            | Mask::IBV_QP_RNR_RETRY
            | Mask::IBV_QP_SQ_PSN
            | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(ibv_qp_state::IBV_QPS_RTS, mask, |attributes| {
            attributes.timeout = 14;
            attributes.retry_cnt = 6;
            attributes.rnr_retry = 7;
            attributes.max_rd_atomic = route.read_depth.1;
        })
    }

    /// From ready to send: what is under way ends, and nothing more is started; an event says when all has ended.
    pub fn drain(&self) -> io::Result<()> {
        self.modify(ibv_qp_state::IBV_QPS_SQD, ibv_qp_attr_mask(0), |_| {})
    }

    /// Gives it up: all outstanding requests complete as flushed, and the peer's fail.
    pub fn fail(&self) -> io::Result<()> {
        self.modify(ibv_qp_state::IBV_QPS_ERR, ibv_qp_attr_mask(0), |_| {})
    }

    /// Asks the device for the present state.
    pub fn state(&self) -> io::Result<QueuePairState> {
        // SAFETY: plain numbers and pointers, for which zero is a value.
        let (mut attributes, mut initial): (ibv_qp_attr, ibv_qp_init_attr) = unsafe { std::mem::zeroed() };
        let mask = ibv_qp_attr_mask::IBV_QP_STATE.0 as c_int;
        // SAFETY: the queue pair is there; both structures are the library's own.
        check(unsafe { (self.domain.context.functions().ibv_query_qp)(self.raw.as_ptr(), &mut attributes, mask, &mut initial) })?;
        Ok(match attributes.qp_state {
            ibv_qp_state::IBV_QPS_RESET => QueuePairState::Reset,
            ibv_qp_state::IBV_QPS_INIT => QueuePairState::Initialized,
            ibv_qp_state::IBV_QPS_RTR => QueuePairState::ReadyToReceive,
            ibv_qp_state::IBV_QPS_RTS => QueuePairState::ReadyToSend,
            ibv_qp_state::IBV_QPS_SQD => QueuePairState::Draining,
            _ => QueuePairState::Failed,
        })
    }

    /// Posts the requests in their order, each of which completes in the queue. Peers find bytes in place once a write has completed.
    pub fn post(&self, requests: &[WorkRequest]) -> Result<(), PostError> {
        const AT_ONCE: usize = 32;
        let mut entries = [const { MaybeUninit::<(ibv_send_wr, ibv_sge)>::uninit() }; AT_ONCE];
        for (chunk, requests) in requests.chunks(AT_ONCE).enumerate() {
            let base = entries.as_mut_ptr().cast::<(ibv_send_wr, ibv_sge)>();
            for (index, request) in requests.iter().enumerate() {
                let Ok(length) = u32::try_from(request.local.length()) else {
                    return Err(PostError { posted: chunk * AT_ONCE, error: io::Error::from_raw_os_error(libc::EINVAL) });
                };
                // SAFETY: `index` is inside the array; every field that the operation reads is written before the list is handed over,
                // and the list is walked within the call only.
                unsafe {
                    let entry = base.add(index);
                    let piece = &raw mut (*entry).1;
                    piece.write(ibv_sge { addr: request.local.address(), length, lkey: request.local_key });
                    let work = &raw mut (*entry).0;
                    (*work).wr_id = request.id;
                    (*work).next = if index + 1 < requests.len() { &raw mut (*base.add(index + 1)).0 } else { ptr::null_mut() };
                    (*work).sg_list = piece;
                    (*work).num_sge = 1;
                    (*work).opcode = match request.opcode {
                        Opcode::Read => ibv_wr_opcode::IBV_WR_RDMA_READ,
                        Opcode::Write => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
                    };
                    (*work).send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
                    (*work).wr.rdma.remote_addr = request.remote_address;
                    (*work).wr.rdma.rkey = request.remote_key;
                }
            }
            // SAFETY: the first entry begins the list.
            let first = unsafe { &raw mut (*base).0 };
            let mut bad: *mut ibv_send_wr = ptr::null_mut();
            // SAFETY: the queue pair is there; the list is complete. Local memory was promised by `MemoryRange::new`, and the device
            // checks it against its key; the peer's device checks the peer's.
            if let Err(error) = check(unsafe { rdma_sys::ibv_post_send(self.raw.as_ptr(), first, &mut bad) }) {
                let refused = (0..requests.len()).find(|index| {
                    // SAFETY: the entry is inside the array; only its address is taken.
                    ptr::eq(unsafe { &raw const (*base.add(*index)).0 }, bad)
                });
                return Err(match refused {
                    Some(refused) => PostError { posted: chunk * AT_ONCE + refused, error },
                    // All are in the queue, and the device could not be told; it may come across them nevertheless.
                    None => PostError {
                        posted: chunk * AT_ONCE + requests.len(),
                        error: io::Error::other(format!("{error}, without saying for which of {} requests", requests.len())),
                    },
                });
            }
        }
        Ok(())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: the queue pair is there, and destroyed once.
        unsafe { (self.domain.context.functions().ibv_destroy_qp)(self.raw.as_ptr()) };
    }
}
