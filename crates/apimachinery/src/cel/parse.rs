//! The parser: turns CEL source into a syntax tree and expands macros into nodes.
//!
//! The depth is limited, so that no source can exhaust the stack in the parser or in evaluation.

use regex::RegexBuilder;

use super::ast::{Comprehension, Expr, Field, Literal, Macro, Node, Offset, Operator};
use super::lex::{Token, tokens};

/// The maximum depth of an expression. Real rules stay below twenty.
const MAX_DEPTH: usize = 80;
const MAX_SOURCE: usize = 32 * 1024;
pub(super) const MAX_REGEX: usize = 1 << 20;
const NAMESPACES: [&str; 9] = [
    "math", "sets", "optional", "ip", "cidr", "format", "base64", "strings", "cel",
];

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(super) struct SyntaxError {
    pub at: Offset,
    pub message: String,
}

impl SyntaxError {
    pub fn new(at: Offset, message: impl Into<String>) -> Self {
        Self {
            at,
            message: message.into(),
        }
    }

    /// The error message in the format of CEL, with line and column.
    pub fn located(&self, source: &str) -> String {
        let before = &source[..self.at.min(source.len())];
        let line = before.matches('\n').count() + 1;
        let column = before
            .rsplit('\n')
            .next()
            .unwrap_or_default()
            .chars()
            .count()
            + 1;
        format!("ERROR: <input>:{line}:{column}: {}", self.message)
    }
}

pub(super) fn parse(source: &str) -> Result<Expr> {
    if source.len() > MAX_SOURCE {
        let message = format!(
            "expression code point size exceeds limit: size: {}, limit {MAX_SOURCE}",
            source.len()
        );
        return Err(SyntaxError::new(0, message));
    }
    let mut parser = Parser {
        tokens: tokens(source)?,
        position: 0,
        depth: 0,
    };
    let expr = parser.expression()?;
    match parser.peek() {
        Token::End => Ok(expr),
        _ => Err(parser.unexpected()),
    }
}

struct Parser {
    tokens: Vec<(Offset, Token)>,
    position: usize,
    depth: usize,
}

type Result<T> = std::result::Result<T, SyntaxError>;

impl Parser {
    fn peek(&self) -> &Token {
        &self.tokens[self.position.min(self.tokens.len() - 1)].1
    }

    fn at(&self) -> Offset {
        self.tokens[self.position.min(self.tokens.len() - 1)].0
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        self.position += 1;
        token
    }

    fn accept(&mut self, symbol: &str) -> bool {
        let found = matches!(self.peek(), Token::Symbol(found) if *found == symbol);
        if found {
            self.position += 1;
        }
        found
    }

    fn expect(&mut self, symbol: &str) -> Result<()> {
        if self.accept(symbol) {
            Ok(())
        } else {
            Err(self.unexpected())
        }
    }

    fn unexpected(&self) -> SyntaxError {
        let found = match self.peek() {
            Token::End => "<EOF>".to_owned(),
            Token::Symbol(symbol) => format!("'{symbol}'"),
            Token::Word(word) => format!("'{word}'"),
            Token::Literal(literal) => format!("{literal:?}"),
        };
        SyntaxError::new(self.at(), format!("Syntax error: unexpected {found}"))
    }

    /// Parses a level of the grammar with the depth increased by one.
    fn deeper<T>(&mut self, level: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(SyntaxError::new(
                self.at(),
                "expression recursion limit exceeded",
            ));
        }
        let result = level(self);
        self.depth -= 1;
        result
    }

    fn expression(&mut self) -> Result<Expr> {
        self.deeper(|parser| {
            let at = parser.at();
            let condition = parser.or()?;
            if !parser.accept("?") {
                return Ok(condition);
            }
            let then = parser.or()?;
            parser.expect(":")?;
            let otherwise = parser.expression()?;
            let node = Node::Conditional(Box::new([condition, then, otherwise]));
            Ok(Expr { at, node })
        })
    }

    fn or(&mut self) -> Result<Expr> {
        let at = self.at();
        let mut terms = vec![self.and()?];
        while self.accept("||") {
            terms.push(self.and()?);
        }
        Ok(joined(at, terms, Node::Or))
    }

    fn and(&mut self) -> Result<Expr> {
        let at = self.at();
        let mut terms = vec![self.relation()?];
        while self.accept("&&") {
            terms.push(self.relation()?);
        }
        Ok(joined(at, terms, Node::And))
    }

    fn binary(
        &mut self,
        operators: &[(&str, Operator)],
        operand: fn(&mut Self) -> Result<Expr>,
    ) -> Result<Expr> {
        let mut left = operand(self)?;
        let mut chain = 0;
        loop {
            let at = self.at();
            let Some((_, operator)) = operators.iter().find(|(symbol, _)| self.accept(symbol))
            else {
                return Ok(left);
            };
            // The tree is left-associative, so a long chain of operators is as deep as nesting.
            chain += 1;
            if chain > MAX_DEPTH {
                return Err(SyntaxError::new(at, "expression recursion limit exceeded"));
            }
            let right = operand(self)?;
            let node = Node::Binary(*operator, Box::new(left), Box::new(right));
            left = Expr { at, node };
        }
    }

    fn relation(&mut self) -> Result<Expr> {
        const OPERATORS: [(&str, Operator); 7] = [
            ("==", Operator::Equal),
            ("!=", Operator::NotEqual),
            ("<=", Operator::LessOrEqual),
            (">=", Operator::GreaterOrEqual),
            ("<", Operator::Less),
            (">", Operator::Greater),
            ("in", Operator::In),
        ];
        self.binary(&OPERATORS, Self::sum)
    }

    fn sum(&mut self) -> Result<Expr> {
        self.binary(
            &[("+", Operator::Add), ("-", Operator::Subtract)],
            Self::product,
        )
    }

    fn product(&mut self) -> Result<Expr> {
        const OPERATORS: [(&str, Operator); 3] = [
            ("*", Operator::Multiply),
            ("/", Operator::Divide),
            ("%", Operator::Modulo),
        ];
        self.binary(&OPERATORS, Self::unary)
    }

    fn unary(&mut self) -> Result<Expr> {
        let at = self.at();
        if self.accept("!") {
            let operand = self.deeper(Self::unary)?;
            return Ok(Expr {
                at,
                node: Node::Not(Box::new(operand)),
            });
        }
        if self.accept("-") {
            let node = match self.deeper(Self::unary)? {
                Expr {
                    node: Node::Literal(Literal::Int(value)),
                    ..
                } => Node::Literal(Literal::Int(value.wrapping_neg())),
                Expr {
                    node: Node::Literal(Literal::Double(value)),
                    ..
                } => Node::Literal(Literal::Double(-value)),
                operand => Node::Negate(Box::new(operand)),
            };
            return Ok(Expr { at, node });
        }
        self.member()
    }

    fn member(&mut self) -> Result<Expr> {
        let mut expr = self.primary()?;
        let mut chain = 0;
        loop {
            let at = self.at();
            chain += 1;
            if chain > MAX_DEPTH {
                return Err(SyntaxError::new(at, "expression recursion limit exceeded"));
            }
            let node = if self.accept(".?") {
                let field = self.field()?;
                Node::Select {
                    operand: Box::new(expr),
                    field,
                    optional: true,
                }
            } else if self.accept(".") {
                let at = self.at();
                let field = self.field()?;
                if self.accept("(") {
                    let arguments = self.arguments(")")?;
                    call(at, Some(expr), field.written, arguments)?
                } else {
                    Node::Select {
                        operand: Box::new(expr),
                        field,
                        optional: false,
                    }
                }
            } else if self.accept("[?") || self.accept("[") {
                let optional = matches!(self.tokens[self.position - 1].1, Token::Symbol("[?"));
                let index = Box::new(self.expression()?);
                self.expect("]")?;
                Node::Index {
                    operand: Box::new(expr),
                    index,
                    optional,
                }
            } else {
                return Ok(expr);
            };
            expr = Expr { at, node };
        }
    }

    fn field(&mut self) -> Result<Field> {
        // `in` is an operator and cannot be a field name; its escaped form can.
        if let Token::Word(word) = self.peek() {
            let field = Field::new(word);
            self.position += 1;
            return Ok(field);
        }
        Err(self.unexpected())
    }

    fn arguments(&mut self, close: &str) -> Result<Vec<Expr>> {
        let mut arguments = Vec::new();
        while !self.accept(close) {
            arguments.push(self.expression()?);
            if !self.accept(",") {
                self.expect(close)?;
                break;
            }
        }
        Ok(arguments)
    }

    fn primary(&mut self) -> Result<Expr> {
        let at = self.at();
        // A leading dot refers to the root container, which is the only one.
        self.accept(".");
        let node = match self.next() {
            Token::Literal(literal) => Node::Literal(literal),
            Token::Word(word) => {
                if self.accept("(") {
                    let arguments = self.arguments(")")?;
                    call(at, None, word, arguments)?
                } else {
                    Node::Ident(word)
                }
            }
            Token::Symbol("(") => {
                let inner = self.expression()?;
                self.expect(")")?;
                return Ok(inner);
            }
            Token::Symbol("[") => self.list("]", false)?,
            Token::Symbol("[?") => self.list("]", true)?,
            Token::Symbol("{") => self.map()?,
            _ => {
                self.position -= 1;
                return Err(self.unexpected());
            }
        };
        Ok(Expr { at, node })
    }

    fn list(&mut self, close: &str, first_optional: bool) -> Result<Node> {
        let mut items = Vec::new();
        let mut optional = first_optional;
        while optional || !self.accept(close) {
            let optional_item = optional || self.accept("?");
            optional = false;
            items.push((self.expression()?, optional_item));
            if !self.accept(",") {
                self.expect(close)?;
                break;
            }
        }
        Ok(Node::List(items))
    }

    fn map(&mut self) -> Result<Node> {
        let mut entries = Vec::new();
        while !self.accept("}") {
            let optional = self.accept("?");
            let key = self.expression()?;
            self.expect(":")?;
            entries.push((key, self.expression()?, optional));
            if !self.accept(",") {
                self.expect("}")?;
                break;
            }
        }
        Ok(Node::Map(entries))
    }
}

fn joined(at: Offset, mut terms: Vec<Expr>, join: fn(Vec<Expr>) -> Node) -> Expr {
    match terms.len() {
        1 => terms.remove(0),
        _ => Expr {
            at,
            node: join(terms),
        },
    }
}

/// A call: a macro, a namespaced function, or a plain function or method.
fn call(at: Offset, target: Option<Expr>, name: String, mut arguments: Vec<Expr>) -> Result<Node> {
    let Some(target) = target else {
        if name == "has" && arguments.len() == 1 {
            return match arguments.remove(0).node {
                Node::Select {
                    operand,
                    field,
                    optional: false,
                } => Ok(Node::Has { operand, field }),
                _ => Err(SyntaxError::new(at, "invalid argument to has() macro")),
            };
        }
        return Ok(function(None, name, arguments));
    };
    if let Node::Ident(namespace) = &target.node
        && NAMESPACES.contains(&namespace.as_str())
    {
        if namespace == "cel" && name == "bind" && arguments.len() == 3 {
            let (body, value) = (arguments.pop(), arguments.pop());
            let variable = variable(&arguments[0])?;
            if let (Some(body), Some(value)) = (body, value) {
                return Ok(Node::Bind {
                    variable,
                    value: Box::new(value),
                    body: Box::new(body),
                });
            }
        }
        return Ok(function(None, format!("{namespace}.{name}"), arguments));
    }
    let kind = match (name.as_str(), arguments.len()) {
        ("all", 2 | 3) => Macro::All,
        ("exists", 2 | 3) => Macro::Exists,
        ("exists_one" | "existsOne", 2 | 3) => Macro::ExistsOne,
        ("map", 2 | 3) => Macro::Map,
        ("filter", 2) => Macro::Filter,
        ("transformList", 3 | 4) => Macro::TransformList,
        ("transformMap", 3 | 4) => Macro::TransformMap,
        ("sortBy", 2) => Macro::SortBy,
        ("optMap", 2) => Macro::OptMap,
        ("optFlatMap", 2) => Macro::OptFlatMap,
        _ => return Ok(function(Some(target), name, arguments)),
    };
    comprehension(kind, target, arguments)
}

fn comprehension(kind: Macro, range: Expr, arguments: Vec<Expr>) -> Result<Node> {
    let two_variables = match kind {
        Macro::All | Macro::Exists | Macro::ExistsOne => arguments.len() == 3,
        Macro::TransformList | Macro::TransformMap => true,
        _ => false,
    };
    let mut arguments = arguments.into_iter();
    let mut name = || {
        arguments
            .next()
            .map_or_else(|| Ok(String::new()), |argument| variable(&argument))
    };
    let first = name()?;
    let second = if two_variables { Some(name()?) } else { None };
    let mut rest: Vec<Expr> = arguments.collect();
    let Some(body) = rest.pop() else {
        return Err(SyntaxError::new(range.at, "missing macro argument"));
    };
    Ok(Node::Comprehension(Box::new(Comprehension {
        kind,
        range,
        variable: first,
        second,
        filter: rest.pop(),
        body,
    })))
}

fn variable(argument: &Expr) -> Result<String> {
    match &argument.node {
        Node::Ident(name) => Ok(name.clone()),
        _ => Err(SyntaxError::new(
            argument.at,
            "argument must be a simple name",
        )),
    }
}

fn function(target: Option<Expr>, name: String, arguments: Vec<Expr>) -> Node {
    let pattern = match (name.as_str(), &target) {
        ("matches" | "find" | "findAll", Some(_)) => arguments.first(),
        ("matches", None) => arguments.get(1),
        _ => None,
    };
    let regex = pattern.and_then(|pattern| match &pattern.node {
        Node::Literal(Literal::String(pattern)) => RegexBuilder::new(pattern)
            .size_limit(MAX_REGEX)
            .build()
            .ok(),
        _ => None,
    });
    Node::Call {
        function: name,
        target: target.map(Box::new),
        arguments,
        regex,
    }
}
