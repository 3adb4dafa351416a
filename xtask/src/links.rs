//! The texts of the repository, and the check that each relative link in a Markdown page leads to a file.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

/// Which files are texts with links or references: by extension, or by name where there is no extension.
const TEXTS: [&str; 12] = [
    "rs",
    "md",
    "toml",
    "yaml",
    "yml",
    "sh",
    "tpl",
    "py",
    "go",
    "run",
    "Makefile",
    "Dockerfile",
];

/// Directories that hold nothing of the repository's own.
const SKIPPED: [&str; 3] = [".git", "target", "node_modules"];

/// A file of the repository.
#[derive(Debug)]
pub struct Text {
    /// The path below the repository's root.
    pub path: PathBuf,
    pub content: String,
}

/// Every text of the repository, sorted by path.
pub fn texts(root: &Path) -> anyhow::Result<Vec<Text>> {
    let mut paths = Vec::new();
    collect(root, &mut paths)?;
    paths.sort();
    let read = |path: PathBuf| {
        let content = fs::read_to_string(&path);
        let content = content.with_context(|| format!("reading {}", path.display()))?;
        let path = path.strip_prefix(root).unwrap_or(&path).to_owned();
        Ok(Text { path, content })
    };
    paths.into_iter().map(read).collect()
}

fn collect(directory: &Path, paths: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let reading = || format!("reading {}", directory.display());
    for entry in fs::read_dir(directory).with_context(reading)? {
        let entry = entry.with_context(reading)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type().with_context(reading)?;
        if kind.is_dir() && !SKIPPED.contains(&name.as_str()) {
            collect(&entry.path(), paths)?;
        } else if kind.is_file() && TEXTS.contains(&name.rsplit('.').next().unwrap_or_default()) {
            paths.push(entry.path());
        }
    }
    Ok(())
}

/// The relative links of Markdown pages that lead nowhere.
pub fn check(root: &Path, texts: &[Text]) -> Vec<String> {
    let is_page = |text: &&Text| {
        text.path
            .extension()
            .is_some_and(|extension| extension == "md")
    };
    let broken = |text: &Text| {
        let directory = text.path.parent().unwrap_or(Path::new("")).to_owned();
        let page = text.path.display().to_string();
        let targets: Vec<String> = relative_links(&text.content).map(str::to_owned).collect();
        let targets = targets.into_iter();
        targets.filter_map(move |target| {
            let exists = root.join(&directory).join(&target).exists();
            (!exists).then(|| format!("{page}: the link to {target} leads nowhere"))
        })
    };
    texts.iter().filter(is_page).flat_map(broken).collect()
}

/// The targets of inline links to other files, without their fragments.
fn relative_links(page: &str) -> impl Iterator<Item = &str> {
    let targets = page.split("](").skip(1).filter_map(|rest| {
        let (target, _) = rest.split_once(')')?;
        Some(target.split('#').next().unwrap_or_default())
    });
    targets.filter(|target| {
        let is_path = !target.contains(char::is_whitespace) && !target.contains(':');
        is_path && !target.is_empty()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_links_to_files_are_checked() {
        let page = "[a](docs/a.md), [b](../b.md#part) [c](#part) [d](https://d.example/e) [f](mailto:f@g) `[0](h i)`";
        let links: Vec<&str> = relative_links(page).collect();
        assert_eq!(links, ["docs/a.md", "../b.md"]);
    }

    #[test]
    fn a_link_that_leads_nowhere_is_reported() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("docs")).unwrap();
        fs::write(root.path().join("docs/a.md"), "[b](b.md) [c](../c.md)").unwrap();
        fs::write(root.path().join("c.md"), "").unwrap();
        let texts = texts(root.path()).unwrap();
        let found = check(root.path(), &texts);
        assert_eq!(found, ["docs/a.md: the link to b.md leads nowhere"]);
    }
}
