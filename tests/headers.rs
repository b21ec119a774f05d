//! Both headers are generated from `src/capi`, and committed. This test fails when they differ, and shows that they compile as every
//! language that they are for. `TE_UPDATE_HEADERS=1 cargo test --test headers` writes them anew.

use std::fmt::Write;
use std::path::Path;

use cbindgen::{Bindings, Builder, Config};

/// The sections of te.h, in the order of the header.
const SECTIONS: [&str; 12] = [
    "status",
    "topology",
    "engine",
    "memory",
    "segment",
    "transfer",
    "batch",
    "pool",
    "notification",
    "statistics",
    "store",
    "configuration",
];

/// What upstream's header defines by macros. They are visible to everything that includes it, so they stay macros.
const MACROS: &str = "\
/// Number of a segment.
#define segment_handle_t int32_t
/// Number of a segment.
#define segment_id_t int32_t
/// Number of a batch.
#define batch_id_t uint64_t
";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn te_header() -> String {
    let directory = root().join("src/capi/te");
    let mut text = String::new();
    for section in SECTIONS {
        let source = directory.join(section).with_extension("rs");
        let prose = prose(&source);
        let (title, rest) = prose.split_once('\n').unwrap_or((&prose, ""));
        let mut bindings = Vec::new();
        bind(&source, "cbindgen-te.toml").write(&mut bindings);
        let rest = comment(rest);
        write!(text, "\n// {}\n// {title}\n", "-".repeat(100)).unwrap();
        if !rest.is_empty() {
            write!(text, "//\n{rest}").unwrap();
        }
        write!(text, "\n{}\n", drop_tags(String::from_utf8(bindings).unwrap().trim())).unwrap();
    }
    header("TE_H", &prose(&directory.join("mod.rs")), &text)
}

fn mooncake_header() -> String {
    let source = root().join("src/capi/mooncake.rs");
    let mut bindings = Vec::new();
    bind(&source, "cbindgen-mooncake.toml").write(&mut bindings);
    let text = format!("\n{MACROS}\n{}\n", String::from_utf8(bindings).unwrap().trim());
    header("TRANSFER_ENGINE_C_H", &prose(&source), &text)
}

/// Names types by their typedef where they are used: cbindgen names those of the same section by their tag.
fn drop_tags(text: &str) -> String {
    let lines = text.lines().map(|line| match line.starts_with("typedef struct ") || line.starts_with("typedef enum ") {
        true => line.to_owned(),
        false => line.replace("struct te_", "te_").replace("enum te_", "te_"),
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn header(guard: &str, prose: &str, body: &str) -> String {
    format!(
        "{}\n#ifndef {guard}\n#define {guard}\n\n#include <stddef.h>\n#include <stdint.h>\n\n\
         #ifdef __cplusplus\nextern \"C\" {{\n#endif\n{body}\n\
         #ifdef __cplusplus\n}}\n#endif\n\n#endif\n",
        comment(prose)
    )
}

fn bind(source: &Path, config: &str) -> Bindings {
    let config = Config::from_file(root().join(config)).unwrap();
    Builder::new().with_config(config).with_src(source).generate().unwrap()
}

/// The module documentation of a source file, without Markdown: code blocks are indented.
fn prose(source: &Path) -> String {
    let source = std::fs::read_to_string(source).unwrap();
    let mut text = String::new();
    let mut in_code = false;
    for line in source.lines().map_while(|line| line.strip_prefix("//!")) {
        let line = line.strip_prefix(' ').unwrap_or(line);
        if line.starts_with("```") {
            in_code = !in_code;
        } else if in_code && !line.is_empty() {
            writeln!(text, "    {line}").unwrap();
        } else {
            writeln!(text, "{line}").unwrap();
        }
    }
    text
}

/// A text as a comment of C, without empty lines at its beginning and end.
fn comment(text: &str) -> String {
    let text = text.trim_matches('\n');
    text.lines().map(|line| if line.is_empty() { "//\n".to_owned() } else { format!("// {line}\n") }).collect()
}

fn check(name: &str, generated: &str) {
    let path = root().join("include").join(name);
    if std::env::var_os("TE_UPDATE_HEADERS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, generated).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    if committed == generated {
        return;
    }
    let line = committed.lines().zip(generated.lines()).position(|(old, new)| old != new);
    let line = line.unwrap_or(committed.lines().count().min(generated.lines().count()));
    panic!(
        "include/{name} differs from src/capi from line {} on:\n- {}\n+ {}\nTE_UPDATE_HEADERS=1 cargo test --test headers writes it anew.",
        line + 1,
        committed.lines().nth(line).unwrap_or("(end)"),
        generated.lines().nth(line).unwrap_or("(end)"),
    );
}

#[test]
fn te_h_is_what_the_source_says() {
    check("te.h", &te_header());
}

#[test]
fn transfer_engine_c_h_is_what_the_source_says() {
    check("transfer_engine_c.h", &mooncake_header());
}

/// Includes both headers, in an order in which neither leans on the other, and says what programs are compiled with.
const PROGRAM: &str = r#"
#include "te.h"
#include "transfer_engine_c.h"
#include "te.h"

#ifdef __cplusplus
#define HOLDS(condition) static_assert(condition, #condition)
#elif __STDC_VERSION__ >= 201112L
#define HOLDS(condition) _Static_assert(condition, #condition)
#else
#define HOLDS(condition) extern char holds[(condition) ? 1 : -1]
#endif
#define SIZE(type, size) HOLDS(sizeof(type) == (size))
#define AT(type, field, offset) HOLDS(offsetof(type, field) == (offset))

SIZE(transfer_request_t, 40);
AT(transfer_request_t, opcode, 0);
AT(transfer_request_t, source, 8);
AT(transfer_request_t, target_id, 16);
AT(transfer_request_t, target_offset, 24);
AT(transfer_request_t, length, 32);
SIZE(transfer_status_t, 16);
AT(transfer_status_t, status, 0);
AT(transfer_status_t, transferred_bytes, 8);
SIZE(notify_msg_t, 16);
AT(notify_msg_t, name, 0);
AT(notify_msg_t, msg, 8);
SIZE(buffer_entry_t, 16);
AT(buffer_entry_t, addr, 0);
AT(buffer_entry_t, length, 8);
SIZE(nic_load_stat_t, 80);
AT(nic_load_stat_t, device_name, 0);
AT(nic_load_stat_t, inflight_bytes, 64);
AT(nic_load_stat_t, ewma_bandwidth_bps, 72);
SIZE(segment_desc_t, 48);
AT(segment_desc_t, type, 0);
AT(segment_desc_t, desc_, 8);
AT(segment_desc_t, desc_.rdma.location, 24);
AT(segment_desc_t, desc_.nvmeof.port, 40);
HOLDS(LOCAL_SEGMENT == 0 && INVALID_BATCH == UINT64_MAX && OPCODE_READ == 0 && OPCODE_WRITE == 1);
HOLDS(STATUS_WAITING == 0 && STATUS_PENDING == 1 && STATUS_INVALID == 2 && STATUS_CANCELED == 3);
HOLDS(STATUS_COMPLETED == 4 && STATUS_TIMEOUT == 5 && STATUS_FAILED == 6);
#if !defined segment_handle_t || !defined segment_id_t || !defined batch_id_t
#error "these are macros in upstream's header"
#endif
HOLDS(sizeof(segment_handle_t) == 4 && sizeof(segment_id_t) == 4 && (segment_id_t)-1 < 0);
HOLDS(sizeof(batch_id_t) == 8 && (batch_id_t)-1 > 0);

SIZE(te_engine_options, 64);
AT(te_engine_options, nics, 40);
AT(te_engine_options, topology_handle, 56);
SIZE(te_memory_options, 32);
SIZE(te_buffer, 16);
SIZE(te_memory_region, 96);
AT(te_memory_region, location, 32);
SIZE(te_transfer_request, 56);
AT(te_transfer_request, retry_hint, 40);
AT(te_transfer_request, group, 48);
AT(te_transfer_request, local, 8);
SIZE(te_transfer_options, 40);
SIZE(te_transfer_result, 24);
AT(te_transfer_result, bytes, 16);
SIZE(te_batch_status, 48);
SIZE(te_notification, 16);
SIZE(te_statistics, 240);
SIZE(te_registration_cost, 64);
SIZE(te_device_cost, 80);
SIZE(te_pool_options, 80);
SIZE(te_pool_lease, 40);
AT(te_pool_lease, addr, 24);
SIZE(te_pool_statistics, 216);
SIZE(te_pool_item, 32);
SIZE(te_pool_transfer_options, 32);
SIZE(te_location_entry, 88);
AT(te_location_entry, location, 24);
SIZE(te_nic_load, 88);
AT(te_nic_load, name, 24);
SIZE(te_configuration, 208);

int use(te_engine *engine, void *buffer, te_log_callback callback);
int use(te_engine *engine, void *buffer, te_log_callback callback) {
    struct transfer_request entry = {OPCODE_WRITE, 0, 1, 2, 3};
    struct transfer_status status;
    te_transfer_request request = {TE_READ, 0, 0, TE_LOCAL_SEGMENT, 0, 0, 0, 0, 0};
    struct te_transfer_options options = {sizeof options, 0, 0, NULL, NULL};
    te_transfer_result result = {sizeof result, 0, 0, 0};
    entry.source = request.local = buffer;
    if (te_batch_transfer(engine, &request, sizeof request, 1, &options, &result, sizeof result) == TE_ERR_TIMEOUT)
        return te_set_log_callback(callback, NULL, TE_LOG_DEBUG);
    submitTransfer((transfer_engine_t)engine, INVALID_BATCH, &entry, 1);
    return getTransferStatus((transfer_engine_t)engine, INVALID_BATCH, 0, &status) + (result.state == TE_STATE_FAILED);
}
"#;

fn compile(file: &str, standard: &str) {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = directory.join(file);
    std::fs::write(&source, PROGRAM).unwrap();
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let result = cc::Build::new()
        .target(&target)
        .host(&target)
        .opt_level(0)
        .cargo_metadata(false)
        .out_dir(directory)
        .cpp(file.ends_with(".cpp"))
        .std(standard)
        .include(root().join("include"))
        .flag("-pedantic")
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        .file(&source)
        .try_compile_intermediates();
    result.unwrap_or_else(|error| panic!("{standard}: {error}"));
}

#[test]
fn the_headers_compile_as_c99() {
    compile("headers_c99.c", "c99");
}

#[test]
fn the_headers_compile_as_c11() {
    compile("headers_c11.c", "c11");
}

#[test]
fn the_headers_compile_as_cpp17() {
    compile("headers_cpp17.cpp", "c++17");
}

#[test]
fn the_headers_declare_what_the_library_exports() {
    let declared =
        |source: &Path, config: &str| -> Vec<String> { bind(source, config).dynamic_symbols_names().map(str::to_owned).collect() };
    let mooncake = declared(&root().join("src/capi/mooncake.rs"), "cbindgen-mooncake.toml");
    assert_eq!(mooncake.len(), 27, "upstream has 27 functions: {mooncake:?}");
    let mut sections: Vec<_> = std::fs::read_dir(root().join("src/capi/te"))
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .filter(|section| section != "mod")
        .collect();
    sections.sort();
    let mut expected = SECTIONS.map(str::to_owned);
    expected.sort();
    assert_eq!(sections, expected, "every file of src/capi/te is a section of te.h");
    let names: Vec<_> = SECTIONS
        .iter()
        .flat_map(|section| declared(&root().join("src/capi/te").join(section).with_extension("rs"), "cbindgen-te.toml"))
        .collect();
    assert!(names.iter().all(|name| name.starts_with("te_")), "{names:?}");
    let exported = count_exports(&root().join("src"));
    assert_eq!(exported, mooncake.len() + names.len(), "every exported function is in a header");
}

/// How many functions a directory of source files exports.
fn count_exports(directory: &Path) -> usize {
    let mut count = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            count += count_exports(&path);
        } else {
            let source = std::fs::read_to_string(&path).unwrap();
            count += source.lines().filter(|line| line.trim_start().starts_with("#[unsafe(no_mangle)]")).count();
        }
    }
    count
}
