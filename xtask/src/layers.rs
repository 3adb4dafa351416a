//! The layers inside a crate. The documentation of a crate's root may list them in a table below the heading `# Layers`, from the
//! bottom to the top: one row for each layer, the modules in the first column. A module may use only modules of lower layers.
//!
//! ```text
//! //! # Layers
//! //!
//! //! | modules | own |
//! //! |---|---|
//! //! | `clock`, `path` | … |
//! //! | `server` | … |
//! ```
//!
//! The check reads `crate::…` paths, in `use` declarations and elsewhere, and `super::…` paths that reach the root. It reads text,
//! not syntax: a module path inside a macro of another crate is not seen.

use std::collections::{BTreeMap, BTreeSet};

const HEADING: &str = "//! # Layers";

/// Checks each crate whose root lists layers. `sources` are the paths and the texts of all source files.
pub fn check(sources: &[(String, String)]) -> Vec<String> {
    let roots = sources
        .iter()
        .filter(|(path, text)| path.ends_with("/src/lib.rs") && text.contains(HEADING));
    roots
        .flat_map(|(path, text)| check_crate(path, text, sources))
        .collect()
}

fn check_crate(root: &str, text: &str, sources: &[(String, String)]) -> Vec<String> {
    let layers = layers_of(text);
    let directory = root.trim_end_matches("lib.rs");
    let mut complaints = Vec::new();
    let mut levels: BTreeMap<&str, usize> = BTreeMap::new();
    for (level, modules) in layers.iter().enumerate() {
        for module in modules {
            if levels.insert(module, level).is_some() {
                complaints.push(format!("{root}: `{module}` is in two layers"));
            }
        }
    }
    let declared = declared_modules(text);
    let listed: BTreeSet<&str> = levels.keys().copied().collect();
    for module in declared.difference(&listed) {
        complaints.push(format!("{root}: `{module}` is in no layer"));
    }
    for module in listed.difference(&declared) {
        complaints.push(format!("{root}: `{module}` is in a layer and not declared"));
    }
    for (path, text) in sources {
        let Some(inside) = path.strip_prefix(directory) else {
            continue;
        };
        let module = inside.split(['/', '.']).next().unwrap_or_default();
        let Some(level) = levels.get(module) else {
            continue;
        };
        for used in uses(text, depth(inside)) {
            let is_allowed = match levels.get(used.as_str()) {
                Some(below) => below < level || used == module,
                // An item that the root exports: it may come from any layer.
                None => level + 1 == layers.len(),
            };
            if !is_allowed {
                complaints.push(format!(
                    "{path}: `{module}` must not use `crate::{used}`: see the layers in {root}"
                ));
            }
        }
    }
    complaints
}

/// The modules of each layer, from the bottom.
fn layers_of(root: &str) -> Vec<Vec<&str>> {
    let table = root.lines().skip_while(|line| *line != HEADING).skip(1);
    table
        .take_while(|line| line.starts_with("//!") && !line.starts_with("//! #"))
        .filter_map(|line| line.strip_prefix("//! | "))
        .map(|row| row.split('|').next().unwrap_or_default())
        // The header of the table has no code in its first column.
        .filter(|cell| cell.contains('`'))
        .map(|cell| cell.split('`').skip(1).step_by(2).collect())
        .collect()
}

/// The modules that a root declares.
fn declared_modules(root: &str) -> BTreeSet<&str> {
    let declarations = root.lines().filter_map(|line| line.strip_suffix(';'));
    declarations
        .filter_map(|line| {
            let (visibility, name) = line.split_once("mod ")?;
            matches!(visibility, "" | "pub " | "pub(crate) ").then_some(name)
        })
        .collect()
}

/// How many modules a file is below the root: one for `a.rs` and `a/mod.rs`, two for `a/b.rs`.
fn depth(inside: &str) -> usize {
    let path = inside.trim_end_matches("/mod.rs");
    path.split('/').count()
}

/// The names that directly follow the root of the crate in the paths of a file.
fn uses(text: &str, depth: usize) -> BTreeSet<String> {
    let code: String = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| [line, "\n"])
        .collect();
    let mut found = BTreeSet::new();
    for (at, keyword) in code.match_indices("crate::") {
        if is_start_of_path(&code, at) {
            found.extend(names_after(&code[at + keyword.len()..]));
        }
    }
    // Test modules are one module deeper, and their `super` is the file itself.
    let product = code.split("#[cfg(test)]").next().unwrap_or_default();
    let to_root = "super::".repeat(depth);
    for (at, _) in product.match_indices(&to_root) {
        if is_start_of_path(product, at) {
            found.extend(names_after(&product[at + to_root.len()..]));
        }
    }
    found.remove("super");
    found
}

fn is_start_of_path(code: &str, at: usize) -> bool {
    let before = code[..at].chars().next_back();
    !before.is_some_and(|before| before.is_alphanumeric() || matches!(before, '_' | ':' | '$'))
}

/// The first names of `a::b` or of each entry of `{a::b, c::{d, e}}`.
fn names_after(path: &str) -> Vec<String> {
    let Some(group) = path.strip_prefix('{') else {
        return name_at(path).into_iter().collect();
    };
    let mut names = Vec::new();
    let mut nested = 0_usize;
    let mut rest = group;
    names.extend(name_at(rest.trim_start()));
    while let Some(at) = rest.find(['{', '}', ',']) {
        let (delimiter, after) = (rest.as_bytes()[at], &rest[at + 1..]);
        match delimiter {
            b'{' => nested += 1,
            b'}' if nested == 0 => break,
            b'}' => nested -= 1,
            _ if nested == 0 => names.extend(name_at(after.trim_start())),
            _ => {}
        }
        rest = after;
    }
    names
}

fn name_at(path: &str) -> Option<String> {
    let name: String = path
        .chars()
        .take_while(|letter| letter.is_alphanumeric() || *letter == '_')
        .collect();
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "//! A crate.\n//!\n//! # Layers\n//!\n//! From the bottom.\n//!\n//! | modules | own |\n//! |---|---|\n\
        //! | `clock`, [`path`] | small things |\n//! | `store` | `server` is only mentioned here |\n//! | `server` | all |\n//!\n\
        //! # Other\n//!\n//! | `x` | y |\n\nmod clock;\npub mod path;\nmod store;\npub(crate) mod server;\n\npub use server::Server;\n";

    fn complaints(root: &str, path: &str, text: &str) -> Vec<String> {
        let source = |path: &str, text: &str| (path.to_owned(), text.to_owned());
        check(&[
            source("crates/a/src/lib.rs", root),
            source(path, text),
            // The crate without layers is free.
            source("crates/b/src/lib.rs", "mod a;\nmod b;\n"),
            source("crates/b/src/a.rs", "use crate::b::C;\n"),
        ])
    }

    #[test]
    fn a_module_uses_only_modules_of_lower_layers() {
        for (file, text, refused) in [
            ("store.rs", "use crate::clock::Clock;", ""),
            ("store/log.rs", "use crate::{clock::Clock, path};", ""),
            ("store/log.rs", "use crate::store::Key;", ""),
            ("server.rs", "use crate::{store::{Key, log}, path};", ""),
            ("store.rs", "// See crate::server.\nuse std::fmt;", ""),
            ("store.rs", "fn f() { $crate::server::g() }", ""),
            ("store.rs", "use other_crate::server;", ""),
            ("store.rs", "use crate::server::Server;", "server"),
            (
                "store.rs",
                "pub use crate::{\n    clock,\n    server::Server,\n};",
                "server",
            ),
            ("store.rs", "use crate::{clock::{A, B}, server};", "server"),
            ("store/log.rs", "fn f() { crate::server::g() }", "server"),
            ("store/mod.rs", "use super::server::Server;", "server"),
            (
                "store/log.rs",
                "use super::super::server::Server;",
                "server",
            ),
            ("store/log.rs", "use super::server;", ""),
            (
                "store.rs",
                "#[cfg(test)]\nmod tests {\n    use super::server;\n}",
                "",
            ),
            (
                "store.rs",
                "#[cfg(test)]\nmod tests {\n    use crate::server;\n}",
                "server",
            ),
            // Modules of one layer do not know each other.
            ("clock.rs", "use crate::path::Path;", "path"),
            // A name that the root exports hides its layer.
            ("store.rs", "use crate::Server;", "Server"),
            ("server.rs", "use crate::Server;", ""),
        ] {
            let found = complaints(ROOT, &format!("crates/a/src/{file}"), text);
            let expected = Vec::from_iter((!refused.is_empty()).then_some(refused));
            assert_eq!(found.len(), expected.len(), "{file}: {text}: {found:?}");
            for (found, refused) in found.iter().zip(expected) {
                assert!(found.contains(&format!("`crate::{refused}`")), "{found}");
            }
        }
    }

    #[test]
    fn every_module_is_in_exactly_one_layer() {
        let text = "//! Owns a.\n";
        for (root, expected) in [
            (ROOT.to_owned(), ""),
            (
                ROOT.replace("mod store;", "mod store;\nmod new;"),
                "`new` is in no layer",
            ),
            (
                ROOT.replace("mod store;\n", ""),
                "`store` is in a layer and not declared",
            ),
            (
                ROOT.replace("| `store` |", "| `store`, `clock` |"),
                "`clock` is in two layers",
            ),
        ] {
            let found = complaints(&root, "crates/a/src/store.rs", text);
            assert_eq!(found.is_empty(), expected.is_empty(), "{found:?}");
            assert!(found.join("\n").contains(expected), "{found:?}");
        }
    }
}
