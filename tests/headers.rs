//! Both headers are generated from `src/capi`, and committed. This test fails when they differ, and shows that they compile as every
//! language that they are for. `TE_UPDATE_HEADERS=1 cargo test --test headers` writes them anew.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use cbindgen::{Bindings, Builder, Config};

/// The sections of te.h, in the order of the header.
const SECTIONS: [&str; 8] =
    ["status", "engine", "memory", "segment", "transfer", "batch", "notification", "statistics"];

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
        write!(text, "\n// {}\n// {title}\n", "-".repeat(100)).unwrap();
        text += &comment(rest);
        write!(text, "\n{}\n", String::from_utf8(bindings).unwrap().trim()).unwrap();
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
