//! The syntax tree of a CEL expression. Macros are separate nodes, so that evaluation can limit and short-circuit them.

use regex::Regex;

/// A position in the source: a byte offset.
pub(super) type Offset = usize;

#[derive(Debug, Clone)]
pub(super) struct Expr {
    pub at: Offset,
    pub node: Node,
}

#[derive(Debug, Clone)]
pub(super) enum Node {
    Literal(Literal),
    Ident(String),
    Select {
        operand: Box<Expr>,
        field: Field,
        optional: bool,
    },
    Has {
        operand: Box<Expr>,
        field: Field,
    },
    Index {
        operand: Box<Expr>,
        index: Box<Expr>,
        optional: bool,
    },
    /// A function or method call. Namespaced functions have their full name (`math.greatest`).
    Call {
        function: String,
        target: Option<Box<Expr>>,
        arguments: Vec<Expr>,
        /// The pattern argument of a regular-expression function, if it is a constant.
        regex: Option<Regex>,
    },
    List(Vec<(Expr, bool)>),
    Map(Vec<(Expr, Expr, bool)>),
    Not(Box<Expr>),
    Negate(Box<Expr>),
    Binary(Operator, Box<Expr>, Box<Expr>),
    And(Vec<Expr>),
    Or(Vec<Expr>),
    Conditional(Box<[Expr; 3]>),
    Comprehension(Box<Comprehension>),
    Bind {
        variable: String,
        value: Box<Expr>,
        body: Box<Expr>,
    },
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Literal {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Double(f64),
    String(String),
    Bytes(Vec<u8>),
}

/// A selected field: the name as written, and the property name after Kubernetes' escaping is undone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Field {
    pub written: String,
    pub property: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operator {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    Add,
    Subtract,
    Multiply,
    Divide,
    Modulo,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Macro {
    All,
    Exists,
    ExistsOne,
    Map,
    Filter,
    TransformList,
    TransformMap,
    SortBy,
    OptMap,
    OptFlatMap,
}

#[derive(Debug, Clone)]
pub(super) struct Comprehension {
    pub kind: Macro,
    pub range: Expr,
    pub variable: String,
    /// With two variables, the first is the index or key and the second is the value.
    pub second: Option<String>,
    /// The predicate before the result in `map(x, p, r)` and in the transforms.
    pub filter: Option<Expr>,
    pub body: Expr,
}

impl Field {
    pub fn new(written: &str) -> Self {
        Self {
            written: written.to_owned(),
            property: unescape(written),
        }
    }
}

/// Undoes the escaping of property names that are not CEL identifiers: `a__dash__b` is `a-b`, and `__namespace__` is `namespace`.
fn unescape(written: &str) -> String {
    const KEYWORDS: [&str; 20] = [
        "true",
        "false",
        "null",
        "in",
        "as",
        "break",
        "const",
        "continue",
        "else",
        "for",
        "function",
        "if",
        "import",
        "let",
        "loop",
        "package",
        "namespace",
        "return",
        "var",
        "void",
    ];
    if !written.contains("__") {
        return written.to_owned();
    }
    let keyword = written
        .strip_prefix("__")
        .and_then(|rest| rest.strip_suffix("__"));
    if let Some(keyword) =
        keyword.filter(|keyword| KEYWORDS.contains(keyword) || *keyword == "while")
    {
        return keyword.to_owned();
    }
    let mut property = String::with_capacity(written.len());
    let mut rest = written;
    'scan: while !rest.is_empty() {
        for (escape, character) in [
            ("__underscores__", "__"),
            ("__dot__", "."),
            ("__dash__", "-"),
            ("__slash__", "/"),
        ] {
            if let Some(after) = rest.strip_prefix(escape) {
                property.push_str(character);
                rest = after;
                continue 'scan;
            }
        }
        let width = rest.chars().next().map_or(0, char::len_utf8);
        property.push_str(&rest[..width]);
        rest = &rest[width..];
    }
    property
}

#[cfg(test)]
mod tests {
    use super::unescape;

    #[test]
    fn escaped_properties_are_recognised() {
        for (written, property) in [
            ("plain", "plain"),
            ("a__dash__b", "a-b"),
            ("x__dot__y__slash__z", "x.y/z"),
            ("__namespace__", "namespace"),
            ("my__underscores__x", "my__x"),
        ] {
            assert_eq!(unescape(written), property);
        }
    }
}
