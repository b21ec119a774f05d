//! The functions of both C interfaces with handles, numbers, sizes and texts that nobody checked. Structs and arrays have the memory
//! that their sizes claim, and registered ranges and local ranges are the caller's: everything else is the library's to check.
//!
//! Ranges in the upper half of the address space belong to no process. They stand for memory that has gone: peers are told that the
//! transfer failed.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use transfer_engine::Code;
use transfer_engine::capi::mooncake::*;
use transfer_engine::capi::te::batch::*;
use transfer_engine::capi::te::engine::*;
use transfer_engine::capi::te::memory::*;
use transfer_engine::capi::te::notification::*;
use transfer_engine::capi::te::segment::*;
use transfer_engine::capi::te::statistics::*;
use transfer_engine::capi::te::status::*;
use transfer_engine::capi::te::transfer::*;

use super::arena::Arena;
use super::input::Input;

const BASE: u64 = 0x2200_0000_0000;
/// Guard pages at both ends are never given away.
const GUARD: u64 = 4096;
const LENGTH: u64 = 6 * 4096;
/// Beyond what any process can map.
const NOWHERE: u64 = 0xffff_8000_0000_0000;
/// Calls in one input.
const CALLS: usize = 40;

/// What lives as long as the process.
struct World {
    arena: Arena,
    engines: [u64; 2],
    names: [CString; 2],
    destroyed: u64,
}

unsafe extern "C" fn hear_nothing(_: *mut c_void, _: te_log_level, _: *const c_char, _: *const c_char) {}

fn create() -> u64 {
    let mut options = [0_u64; size_of::<te_engine_options>() / 8];
    (options[0], options[2]) = (size_of::<te_engine_options>() as u64, c"127.0.0.1".as_ptr() as u64);
    let mut engine = std::ptr::null_mut();
    // SAFETY: the options have their size, and the texts end with a NUL.
    assert_eq!(unsafe { te_engine_create(options.as_ptr().cast(), &mut engine) }, TE_OK, "{}", last_error());
    engine as u64
}

fn last_error() -> String {
    // SAFETY: it is a text.
    unsafe { CStr::from_ptr(te_last_error()) }.to_str().expect("it is UTF-8").to_owned()
}

impl World {
    fn make() -> World {
        // SAFETY: the function may be called from anywhere.
        unsafe { te_set_log_callback(Some(hear_nothing), std::ptr::null_mut(), te_log_level::TE_LOG_TRACE as i32) };
        let (engines, destroyed) = ([create(), create()], create());
        // SAFETY: it is an engine.
        assert_eq!(unsafe { te_engine_destroy(destroyed as *mut te_engine) }, TE_OK);
        let names = engines.map(|engine| {
            let mut name = [0; 64];
            // SAFETY: the buffer has its size.
            assert_eq!(unsafe { te_engine_address(engine as *mut te_engine, name.as_mut_ptr(), name.len()) }, TE_OK);
            // SAFETY: the text ends with a NUL.
            unsafe { CStr::from_ptr(name.as_ptr()) }.to_owned()
        });
        World { arena: Arena::map(BASE as usize, LENGTH as usize), engines, names, destroyed }
    }
}

/// A program of calls.
pub fn run(data: &[u8]) {
    static WORLD: OnceLock<World> = OnceLock::new();
    let world = WORLD.get_or_init(World::make);
    let mut caller = Caller {
        world,
        input: Input::new(data),
        texts: Vec::new(),
        structs: Vec::new(),
        engine: 0,
        batches: Vec::new(),
        segments: Vec::new(),
    };
    if !caller.input.byte().is_multiple_of(4) {
        caller.set_up();
    }
    for _ in 0..CALLS {
        if caller.input.is_empty() {
            break;
        }
        if caller.input.byte().is_multiple_of(4) { caller.call_mooncake() } else { caller.call_te() }
    }
    caller.tidy_up();
}

struct Caller<'a> {
    world: &'a World,
    input: Input<'a>,
    /// What pointers that were passed point to.
    texts: Vec<CString>,
    structs: Vec<Vec<u8>>,
    /// An engine that this input has made, or 0.
    engine: u64,
    /// Engine and number.
    batches: Vec<(u64, u64)>,
    segments: Vec<u64>,
}

impl Caller<'_> {
    fn number(&mut self) -> u64 {
        match self.input.byte() % 8 {
            0 => self.input.choose(&[0, 1, 2, 7, 8, 24, 32, 40, 48, 64, 96, 184, 4095, 4096, 4097]),
            1 => self.input.choose(&[1 << 31, u32::MAX as u64, 1 << 32, i64::MAX as u64, 1 << 63, u64::MAX - 1, u64::MAX]),
            2 => self.input.number(),
            _ => u64::from(self.input.byte()),
        }
    }

    fn engine(&mut self) -> u64 {
        match self.input.byte() % 16 {
            0 => 0,
            1 => self.world.destroyed,
            2 => self.number(),
            3 => self.world.engines[0].wrapping_add(self.number()),
            4 | 5 => self.engine,
            6..10 => self.world.engines[1],
            _ => self.world.engines[0],
        }
    }

    /// One that may be destroyed.
    fn spare_engine(&mut self) -> u64 {
        let engine = self.engine();
        if self.world.engines.contains(&engine) { std::mem::take(&mut self.engine) } else { engine }
    }

    fn batch(&mut self) -> u64 {
        let place = self.input.byte() as usize;
        match self.batches.len() {
            0 => self.number(),
            _ if place >= 224 => self.number(),
            length => self.batches[place % length].1,
        }
    }

    fn segment(&mut self) -> u64 {
        let place = self.input.byte() as usize;
        match self.segments.len() {
            0 => self.number(),
            _ if place >= 224 => self.number(),
            length => self.segments[place % length],
        }
    }

    fn bytes(&mut self) -> Vec<u8> {
        let length = self.input.byte() as usize % 64;
        self.input.take(length).iter().copied().filter(|byte| *byte != 0).collect()
    }

    fn keep(&mut self, text: Vec<u8>) -> *const c_char {
        self.texts.push(CString::new(text).unwrap_or_default());
        self.texts[self.texts.len() - 1].as_ptr()
    }

    /// NULL, or any text.
    fn text(&mut self) -> *const c_char {
        match self.input.byte() % 8 {
            0 => std::ptr::null(),
            1 => c"tcp".as_ptr(),
            2 => c"*".as_ptr(),
            3 => c"P2PHANDSHAKE".as_ptr(),
            _ => {
                let text = self.bytes();
                self.keep(text)
            }
        }
    }

    /// NULL, or a name of a peer on loopback: looking up any other would ask the network.
    fn peer_name(&mut self) -> *const c_char {
        let mut name = match self.input.byte() % 8 {
            0 => return std::ptr::null(),
            1 => [b"\xff", &*self.bytes()].concat(),
            2 => b"///".to_vec(),
            3 => [b"127.0.0.1:", &*self.bytes()].concat(),
            4 => self.world.names[0].as_bytes().to_vec(),
            5 => [b"/", self.world.names[1].as_bytes()].concat(),
            _ => self.world.names[1].as_bytes().to_vec(),
        };
        if let Some(colon) = name.iter().position(|byte| *byte == b':') {
            let colons = name.split_off(colon + 1);
            name.extend(colons.into_iter().filter(|byte| *byte != b':'));
        }
        self.keep(name)
    }

    /// NULL, a path at which there can be no socket, or one of a few of this process.
    fn socket(&mut self) -> *const c_char {
        let place = std::env::temp_dir().join(format!("te-fuzz-{}-", std::process::id()));
        let place = place.into_os_string().into_encoded_bytes();
        let path = match self.input.byte() % 8 {
            0 => return std::ptr::null(),
            1 => Vec::new(),
            2 => b"/nowhere/socket".to_vec(),
            3 => [&place[..], b"\xff"].concat(),
            4 => [place, vec![b'x'; 200]].concat(),
            5 => std::env::temp_dir().into_os_string().into_encoded_bytes(),
            _ => [&place[..], &[b'0' + self.input.byte() % 4]].concat(),
        };
        self.keep(path)
    }

    /// Bytes of a struct or an array. It may claim to be larger, where the library refuses the size.
    fn bytes_of(&mut self, size: usize, content: &[u8]) -> *mut u8 {
        let mut bytes = vec![0; size.clamp(8, 1 << 16)];
        let length = bytes.len().min(content.len());
        bytes[..length].copy_from_slice(&content[..length]);
        let address = bytes.as_mut_ptr();
        self.structs.push(bytes);
        address
    }

    /// A size for a struct of which the library knows `known` bytes.
    fn size(&mut self, known: usize) -> usize {
        match self.input.byte() % 8 {
            0 => self.number() as usize,
            1 => known + self.input.byte() as usize,
            2 => known - 8,
            _ => known,
        }
    }

    /// NULL, or a struct that begins with its size and goes on with these words, perhaps with something behind them.
    fn options(&mut self, words: &[u64]) -> *mut u8 {
        let size = self.size(8 + 8 * words.len());
        if self.input.byte().is_multiple_of(8) {
            return std::ptr::null_mut();
        }
        let mut content: Vec<u8> = [size as u64].iter().chain(words).flat_map(|word| word.to_ne_bytes()).collect();
        if self.input.byte().is_multiple_of(8) {
            content.extend(self.input.take(16));
        }
        self.bytes_of(size, &content)
    }

    /// A place for a result: NULL, misaligned, or good.
    fn place<T>(&mut self) -> *mut T {
        let place = self.bytes_of(2 * size_of::<T>().max(8), &[]);
        match self.input.byte() % 16 {
            0 => std::ptr::null_mut(),
            1 => place.wrapping_add(1).cast(),
            _ => place.wrapping_add(place.align_offset(16)).cast(),
        }
    }

    /// A buffer and its size.
    fn buffer(&mut self) -> (*mut c_char, usize) {
        let size = self.input.byte() as usize;
        let buffer = if self.input.byte().is_multiple_of(8) { std::ptr::null_mut() } else { self.bytes_of(size, &[]).cast() };
        (buffer, size)
    }

    /// A range that may be registered: of the arena, nowhere, empty, or one that wraps.
    fn range(&mut self) -> (u64, u64) {
        let (address, length) = self.local_range();
        match self.input.byte() % 8 {
            0 => (0, length),
            1 => (NOWHERE | self.number(), self.number()),
            _ => (address, length),
        }
    }

    /// A range of memory that is the caller's, or one that wraps.
    fn local_range(&mut self) -> (u64, u64) {
        let inside = (LENGTH - 2 * GUARD) as usize;
        let offset = self.input.below(inside);
        match self.input.byte() % 16 {
            0 => (BASE + GUARD + offset as u64, u64::MAX - u64::from(self.input.byte())),
            1 => (self.number(), 0),
            2 => (BASE + GUARD + offset as u64, (inside - offset) as u64),
            _ => (BASE + GUARD + offset as u64, self.input.below((inside - offset).min(1024)) as u64),
        }
    }

    /// Words of a request in the order of `te_transfer_request`.
    fn request(&mut self) -> [u64; 5] {
        let (local, length) = self.local_range();
        let opcode = match self.input.byte() % 16 {
            0 => self.number(),
            choice => u64::from(choice % 2),
        };
        let segment = self.segment();
        let remote = match self.input.byte() % 8 {
            0 => self.number(),
            1 => NOWHERE | self.number(),
            _ => BASE + self.input.below(LENGTH as usize) as u64,
        };
        // A local copy touches its target directly, and that there is such memory is the caller's promise.
        let remote = if segment & 0xffff_ffff == 0 { remote & !NOWHERE } else { remote };
        [opcode, local, segment, remote, length]
    }

    /// An array of structs of which the library knows `known` bytes: its address, the size of an element, and their number.
    fn array(&mut self, known: usize, element: impl FnMut(&mut Self) -> Vec<u8>) -> (*mut u8, usize, usize) {
        let size = self.size(known);
        let (array, count) = self.elements(size, element);
        (array, size, count)
    }

    /// An array with elements of `size` bytes, and their number: NULL, too large for any memory, or good.
    fn elements(&mut self, size: usize, mut element: impl FnMut(&mut Self) -> Vec<u8>) -> (*mut u8, usize) {
        let count = self.input.byte() as usize % 6;
        match self.input.byte() % 16 {
            0 => return (std::ptr::null_mut(), count),
            1 => return (self.bytes_of(8, &[]), (usize::MAX / size.max(1)).saturating_sub(count)),
            _ => {}
        }
        let mut content = Vec::new();
        for _ in 0..count {
            let mut bytes = element(self);
            bytes.resize(size.min(4096), 0);
            content.append(&mut bytes);
        }
        (self.bytes_of(content.len(), &content), count)
    }

    fn request_bytes(&mut self) -> Vec<u8> {
        self.request().iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn requests(&mut self) -> (*const te_transfer_request, usize, usize) {
        let (array, size, count) = self.array(size_of::<te_transfer_request>(), Caller::request_bytes);
        (array.cast(), size, count)
    }

    fn transfer_options(&mut self) -> *const te_transfer_options {
        // Times are short, or none: nothing that waits for long is of use here.
        let times = [0, 0, 0, 1, 2000, u64::MAX, i64::MAX as u64];
        let (timeout, stall) = (self.input.choose(&times), self.input.choose(&times));
        let notification = match self.input.byte() % 8 {
            0 => [self.text() as u64, self.text() as u64],
            _ => [0, 0],
        };
        self.options(&[timeout, stall, notification[0], notification[1]]).cast()
    }

    fn memory_options(&mut self) -> *const te_memory_options {
        let halves = |input: &mut Input<'_>| u64::from(input.choose(&[0u32, 0, 0, 1, 2, 3, u32::MAX]));
        let words = [
            halves(&mut self.input) | halves(&mut self.input) << 32,
            halves(&mut self.input) | u64::from(self.input.byte() == 255) << 32,
        ];
        let location = self.text() as u64;
        self.options(&[location, words[0], words[1]]).cast()
    }

    /// Both engines with memory, a batch, and each other's segment: most programs get somewhere.
    fn set_up(&mut self) {
        let half = (LENGTH - 2 * GUARD) / 2;
        let World { engines, names, .. } = self.world;
        for (number, engine) in engines.iter().enumerate() {
            let (key, engine, address) = (*engine, *engine as *mut te_engine, BASE + GUARD + half * number as u64);
            let (mut segment, mut batch) = (0, 0);
            // SAFETY: the range is the caller's, texts end with a NUL, and the places are good.
            unsafe {
                let registered = te_register_local_memory(engine, address as *mut c_void, half as usize, std::ptr::null());
                assert_eq!(registered, TE_OK, "{}", last_error());
                assert_eq!(te_open_segment(engine, names[1 - number].as_ptr(), &mut segment), TE_OK, "{}", last_error());
                assert_eq!(te_batch_create(engine, 8, &mut batch), TE_OK, "{}", last_error());
            }
            self.segments.push(segment);
            self.batches.push((key, batch));
        }
    }

    fn call_te(&mut self) {
        let engine = self.engine() as *mut te_engine;
        // SAFETY: every pointer is NULL where that is allowed to be found out, or leads to as much memory as is said; texts end with a
        // NUL; ranges are as for `range` and `local_range`; engines, batches and segments may be any numbers.
        let status = unsafe {
            match self.input.byte() % 34 {
                0 if self.engine == 0 => {
                    let words = [self.text() as u64, self.text() as u64, self.text() as u64, self.text() as u64];
                    let (options, created) = (self.options(&words), self.place::<*mut te_engine>());
                    let status = te_engine_create(options.cast(), created);
                    if status == TE_OK {
                        self.engine = created.read() as u64;
                    }
                    status
                }
                0 | 1 => te_engine_destroy(self.spare_engine() as *mut te_engine),
                2 => {
                    let (buffer, size) = self.buffer();
                    te_engine_address(engine, buffer, size)
                }
                3 => te_install_transport(engine, self.text(), self.text()),
                4..8 => {
                    let ((address, length), options) = (self.range(), self.memory_options());
                    te_register_local_memory(engine, address as *mut c_void, length as usize, options)
                }
                8 => te_unregister_local_memory(engine, self.range().0 as *mut c_void),
                9 => {
                    let (array, size, count) = self.array(size_of::<te_buffer>(), |caller| {
                        let (address, length) = caller.range();
                        [address, length].iter().flat_map(|word| word.to_ne_bytes()).collect()
                    });
                    te_register_local_memory_batch(engine, array.cast(), size, count, self.memory_options())
                }
                10 => {
                    let (array, count) = self.addresses();
                    te_unregister_local_memory_batch(engine, array.cast(), count)
                }
                11 => {
                    let address = self.number() as *const c_void;
                    te_find_local_memory(engine, address, self.options(&[0; 11]).cast())
                }
                12 => {
                    let (array, size, count) = self.array(size_of::<te_memory_region>(), |_| Vec::new());
                    te_list_local_memory(engine, array.cast(), size, count, self.place())
                }
                13..16 => {
                    let (name, segment) = (self.peer_name(), self.place::<te_segment>());
                    let status = te_open_segment(engine, name, segment);
                    if status == TE_OK {
                        self.segments.push(segment.read());
                    }
                    status
                }
                16 => te_close_segment(engine, self.segment()),
                17 => te_refresh_segment(engine, self.segment()),
                18 => {
                    let (array, size, count) = self.array(size_of::<te_memory_region>(), |_| Vec::new());
                    te_list_segment_memory(engine, self.segment(), array.cast(), size, count, self.place())
                }
                19 => te_probe_segment(engine, self.segment()),
                20..23 => {
                    let ((requests, size, count), options) = (self.requests(), self.transfer_options());
                    let (mut results, mut result_size) = (std::ptr::null_mut(), self.size(size_of::<te_transfer_result>()));
                    if !self.input.byte().is_multiple_of(4) {
                        result_size = result_size.min(8192);
                        results = self.bytes_of(result_size.saturating_mul(count), &[]).cast();
                    }
                    te_batch_transfer(engine, requests, size, count, options, results, result_size)
                }
                23 => {
                    let (capacity, batch) = (self.number() as usize, self.place::<te_batch>());
                    let status = te_batch_create(engine, capacity, batch);
                    if status == TE_OK {
                        self.batches.push((engine as u64, batch.read()));
                    }
                    status
                }
                24 => {
                    let (batch, (requests, size, count)) = (self.batch(), self.requests());
                    te_batch_submit(engine, batch, requests, size, count, self.transfer_options())
                }
                25 => te_batch_task_status(engine, self.batch(), self.number() as usize, self.options(&[0; 2]).cast()),
                26 => {
                    let (batch, task, (buffer, size)) = (self.batch(), self.number() as usize, self.buffer());
                    te_batch_task_error(engine, batch, task, buffer, size)
                }
                27 => te_batch_poll(engine, self.batch(), self.options(&[0; 5]).cast()),
                28 => {
                    let timeout = self.input.choose(&[0, 1, -1, i64::MIN, i64::MAX]);
                    te_batch_wait(engine, self.batch(), timeout, self.options(&[0; 5]).cast())
                }
                29 => te_batch_cancel(engine, self.batch()),
                30 => te_batch_event_fd(engine, self.batch(), self.place()),
                31 => te_batch_free(engine, self.batch()),
                32 => match self.input.byte() % 8 {
                    0 => te_notify(engine, self.segment(), self.text(), self.text()),
                    1 => te_set_log_callback(Some(hear_nothing), std::ptr::null_mut(), self.number() as i32),
                    2 => te_get_statistics(engine, self.options(&[0; 22]).cast()),
                    3 => {
                        assert!(!te_version().is_null());
                        CStr::from_ptr(te_status_name(self.number() as te_status)).to_str().expect("a name is ASCII");
                        TE_OK
                    }
                    4 | 5 => {
                        let text = self.place::<*mut c_char>();
                        let status = te_metrics(engine, text);
                        if status == TE_OK {
                            let metrics = CStr::from_ptr(text.read()).to_str().expect("it is UTF-8");
                            assert!(metrics.starts_with("# HELP ") && metrics.ends_with('\n'), "{metrics}");
                            te_free_text(text.read());
                        }
                        status
                    }
                    _ => {
                        // The others live as long as the process, and so would their sockets' files.
                        let engine = if self.world.engines.contains(&(engine as u64)) { self.engine } else { engine as u64 };
                        te_serve_metrics(engine as *mut te_engine, self.socket())
                    }
                },
                _ => {
                    let (list, count) = (self.place::<*mut te_notification>(), self.place::<usize>());
                    let status = te_take_notifications(engine, list, count);
                    if status == TE_OK {
                        te_free_notifications(list.read(), count.read());
                    }
                    status
                }
            }
        };
        // SAFETY: the name is a text.
        let name = unsafe { CStr::from_ptr(te_status_name(status)) };
        assert_ne!(name, c"unknown", "{status}");
        assert_ne!(status, TE_ERR_INTERNAL, "{}", last_error());
    }

    fn addresses(&mut self) -> (*mut u8, usize) {
        self.elements(8, |caller| caller.range().0.to_ne_bytes().to_vec())
    }

    fn notification(&mut self) -> notify_msg_t {
        notify_msg { name: self.text().cast_mut(), msg: self.text().cast_mut() }
    }

    /// Requests in the form of the older interface, whose fields have the same places.
    fn entries(&mut self) -> (*mut transfer_request, usize) {
        let (array, count) = self.elements(size_of::<transfer_request>(), Caller::request_bytes);
        (array.cast(), count)
    }

    fn call_mooncake(&mut self) {
        let engine = self.engine() as *mut c_void;
        // SAFETY: as for `call_te`.
        let status = unsafe {
            match self.input.byte() % 22 {
                0 if self.engine == 0 => {
                    let (metadata, name, host) = (self.text(), self.text(), self.text());
                    self.engine =
                        createTransferEngine(metadata, name, host, self.number(), c_int::from(self.input.byte() % 2)) as u64;
                    0
                }
                0 | 1 => {
                    destroyTransferEngine(self.spare_engine() as *mut c_void);
                    0
                }
                2 => discoverTopology(engine),
                3 => {
                    let (buffer, size) = self.buffer();
                    getLocalIpAndPort(engine, buffer, size)
                }
                4 => {
                    let (protocol, mut arguments) = (self.text(), [self.text().cast_mut().cast::<c_void>()]);
                    let arguments = if self.input.byte().is_multiple_of(2) { std::ptr::null_mut() } else { arguments.as_mut_ptr() };
                    installTransport(engine, protocol, arguments);
                    0
                }
                5 => {
                    uninstallTransport(engine, self.text())
                        | closeSegment(engine, self.number() as i32)
                        | warmupEfaSegment(engine, self.text())
                }
                6 | 7 => {
                    let name = self.peer_name();
                    let segment = if self.input.byte().is_multiple_of(2) {
                        openSegment(engine, name)
                    } else {
                        openSegmentNoCache(engine, name)
                    };
                    if segment >= 0 {
                        self.segments.push(segment as u64);
                    }
                    0
                }
                8 => removeLocalSegment(engine, self.peer_name()),
                9 => syncSegmentCache(engine),
                10 => {
                    let ((address, length), location) = (self.range(), self.text());
                    registerLocalMemory(
                        engine,
                        address as *mut c_void,
                        length as usize,
                        location,
                        c_int::from(self.input.byte() % 2),
                    )
                }
                11 => unregisterLocalMemory(engine, self.range().0 as *mut c_void),
                12 => {
                    let ranges: Vec<_> = (0..self.input.byte() % 4).map(|_| self.range()).collect();
                    let mut buffers: Vec<_> = ranges
                        .into_iter()
                        .map(|(address, length)| buffer_entry { addr: address as *mut c_void, length: length as usize })
                        .collect();
                    let count = if self.input.byte().is_multiple_of(16) { usize::MAX / 16 } else { buffers.len() };
                    registerLocalMemoryBatch(engine, buffers.as_mut_ptr(), count, self.text())
                }
                13 => {
                    let (array, count) = self.addresses();
                    unregisterLocalMemoryBatch(engine, array.cast(), count)
                }
                14 => {
                    let batch = allocateBatchID(engine, self.number() as usize);
                    if batch != INVALID_BATCH {
                        self.batches.push((engine as u64, batch));
                    }
                    0
                }
                15 | 16 => {
                    let (batch, (entries, count)) = (self.batch(), self.entries());
                    match self.input.byte() % 4 {
                        0 => submitTransferWithNotify(engine, batch, entries, count, self.notification()),
                        _ => submitTransfer(engine, batch, entries, count),
                    }
                }
                17 => getTransferStatus(engine, self.batch(), self.number() as usize, self.place()),
                18 => freeBatchID(engine, self.batch()),
                19 => {
                    let size = self.place::<c_int>();
                    let list = getNotifsFromEngine(engine, size);
                    freeNotifsMsgBuf(list, if list.is_null() { self.number() as c_int } else { size.read() })
                }
                20 => genNotifyInEngine(engine, self.segment(), self.notification()),
                _ => {
                    let (buffer, size) = self.buffer();
                    getNicLoadStats(engine, self.place(), self.place())
                        | showLinks(engine, buffer, size, c_int::from(self.input.byte() % 2))
                }
            }
        };
        assert!((-2000..1000).contains(&status), "{status}");
        // Here a number may stand for several errors; the text begins with the name of one.
        assert!(!last_error().starts_with(Code::Internal.name()), "{}", last_error());
    }

    /// Frees everything, and looks at what must have stayed as it was.
    fn tidy_up(&mut self) {
        // SAFETY: as for `call_te`.
        unsafe {
            if self.engine != 0 {
                te_engine_destroy(self.engine as *mut te_engine);
            }
            for &(engine, batch) in &self.batches {
                te_batch_wait(engine as *mut te_engine, batch, -1, std::ptr::null_mut());
                te_batch_free(engine as *mut te_engine, batch);
            }
            for engine in self.world.engines.map(|engine| engine as *mut te_engine) {
                let mut regions = [[0u64; 12]; 256];
                let mut count = 0;
                assert_eq!(te_list_local_memory(engine, regions.as_mut_ptr().cast(), 96, 256, &mut count), TE_OK);
                for region in &regions[..count] {
                    // References are counted, so it may take several.
                    while te_unregister_local_memory(engine, region[1] as *mut c_void) == TE_OK {}
                }
                let mut statistics = [0u64; size_of::<te_statistics>() / 8];
                statistics[0] = size_of::<te_statistics>() as u64;
                assert_eq!(te_get_statistics(engine, statistics.as_mut_ptr().cast()), TE_OK);
                let statistics = statistics.as_ptr().cast::<te_statistics>().read();
                assert_eq!(statistics.regions_live, 0);
                assert_eq!(statistics.batches_allocated, statistics.batches_freed);
                assert_eq!(
                    statistics.tasks_submitted,
                    statistics.tasks_completed + statistics.tasks_failed + statistics.tasks_timed_out + statistics.tasks_cancelled
                );
            }
        }
        let content = self.world.arena.content();
        for index in (0..GUARD as usize).chain((LENGTH - GUARD) as usize..LENGTH as usize) {
            assert_eq!(content[index], Arena::pattern(index), "byte {index} is nobody's and was written");
        }
        self.world.arena.fill();
    }
}
